"""Builds a run's report: one HTML page that loads nothing, which a content security policy enforces."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from groundwire.train.algorithms.health import warnings_by_step
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.evaluation.diagnosis import KINDS
from groundwire.train.evaluation.metrics import format_accuracy, format_change
from groundwire.train.evaluation.run_reader import paired_changes, settings_changes
from groundwire.train.evaluation.validation import VALIDATIONS
from groundwire.train.report.charts import Chart, charts, css_class, svg
from groundwire.train.report.rollout_browser import choose, read_notes, rollout_data
from groundwire.train.report.token_text import token_decoder

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Report:
    """The page and its charts."""

    html: str
    charts: Sequence[Chart]


def build(run: RunDir, *, live: str = "") -> Report:
    """The report of an active, stopped, killed or finished run.

    ``live`` is a script that reloads the page. Raises :class:`groundwire.train.artifacts.run_dir.RunDirError` for a
    damaged ``config.json`` or ``metrics.jsonl``.
    """
    config, metrics = run.config(), run.metrics()
    notes = read_notes(run)
    data = rollout_data(run, choose(notes.rollouts), token_decoder(run))
    drawn = charts(metrics, notes.lengths)
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    html = environment.get_template("page.html").render(
        title=f"{config.get('backend', 'agent')} on {config.get('domain', 'tasks')}, {run.path.name}",
        state=_state(config, metrics),
        warnings=[*notes.unreadable, *settings_changes(run), *warnings_by_step(metrics)],
        tiles=list(_tiles(metrics, len(notes.rollouts), _changes(run))),
        charts=[(chart, svg(chart)) for chart in drawn],
        css_class=css_class,
        reasons=[(KINDS[kind], count) for kind, count in notes.reasons.most_common()],
        total=len(notes.rollouts),
        shown=len(data["rollouts"]),
        settings=json.dumps(config, indent=1, ensure_ascii=False, default=str),
        data=_pack(data),
        style=(_FOLDER / "page.css").read_text(),
        script=(_FOLDER / "page.js").read_text(),
        live=live,
    )
    return Report(html=html, charts=drawn)


def _pack(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def _state(config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    step, steps = metrics[-1]["step"] if metrics else 0, config.get("steps")
    if steps and step < steps:
        progress = f"step {step} of {steps}: active or stopped"
    else:
        progress = f"{step} of {steps} steps" if steps else f"step {step}"
    return f"model {config.get('model', '?')} · seed {config.get('seed', 0)} · {progress}"


def _changes(run: RunDir) -> Mapping[str, Mapping[str, Any]]:
    try:
        return paired_changes(run)
    except RunDirError:  # there is no validation yet, or the page's warnings name the file
        return {}


def _tiles(
    metrics: Sequence[Mapping[str, Any]], total: int, changes: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """The values at the top of the page, with their labels."""
    for key, way in VALIDATIONS.items():
        if results := [line[key] for line in metrics if key in line]:
            first, last = results[0], results[-1]
            low, high = last["ci95"]
            values = [format_accuracy(result["accuracy"]) for result in ([first, last] if len(results) > 1 else [last])]
            name = last.get("metric_name", "accuracy")
            change = f"; {format_change(changes[key])}" if key in changes else ""
            yield " → ".join(values), f"{way} {name}, of {last['n']} [{low:.2f}, {high:.2f}]{change}"
    yield f"{total:,}", "rollouts, with validation"
    yield f"{sum(sum(line.get('failures', {}).values()) for line in metrics):,}", "failed in training"
    if metrics and "wall_time_s" in metrics[-1]:
        yield _format_duration(metrics[-1]["wall_time_s"]), "wall time"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
