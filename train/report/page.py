"""The page: its figures as HTML, its rollouts as packed data that the page's script unpacks.

One file, with nothing from elsewhere: a content security policy forbids it, so that even a mistake here could not load
or send anything.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from groundwire.train.evaluation.validation import shown
from groundwire.train.report.charts import Chart
from groundwire.train.report.svg import draw

__all__ = ["page"]

_FOLDER = Path(__file__).parent


def page(
    *,
    name: str,
    config: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    charts: Sequence[Chart],
    reasons: Sequence[tuple[str, int]],
    data: Mapping[str, Any],
    total: int,
    warnings: Sequence[str] = (),
    live: str = "",
) -> str:
    """The whole document. ``total`` is how many rollouts the run has; ``live`` a script that reloads the page."""
    title = f"{config.get('backend', 'agent')} on {config.get('domain', 'tasks')}, {name}"
    style, script = ((_FOLDER / file).read_text() for file in ("page.css", "page.js"))
    connect = "connect-src 'self'; " if live else ""
    policy = f"default-src 'none'; {connect}style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    body = [
        f'<header class="top"><h1>{escape(title)}</h1><p class="state">{escape(_state(config, metrics))}</p>',
        *(f'<p class="warning">{escape(warning)}</p>' for warning in warnings),
        f'<div class="tiles">{"".join(_tiles(metrics, total))}</div></header><main>',
        "<h2>Curves</h2>" if charts else '<p class="soft">No step has ended yet, so there is no curve.</p>',
        f'<div class="charts">{"".join(map(draw, charts))}</div>',
        *_reasons(reasons, total),
        _browser(),
        f"</main><footer>{_footer(config, data, total)}</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{''.join(body)}"
        f'<script id="data" type="text/plain">{_packed(data)}</script><script>{script}{live}</script></body></html>\n'
    )


def _packed(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def _state(config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    step = metrics[-1]["step"] if metrics else 0
    steps = config.get("steps")
    parts = [f"model {config.get('model', '?')}", f"seed {config.get('seed', 0)}"]
    if steps and step < steps:
        parts.append(f"step {step} of {steps}: it is going on, or was stopped")
    else:
        parts.append(f"{step} steps, all of them" if steps else f"step {step}")
    return " · ".join(parts)


def _tiles(metrics: Sequence[Mapping[str, Any]], total: int) -> Iterator[str]:
    for key, way in (("validation", "greedy"), ("validation_sampled", "sampled")):
        found = [line[key] for line in metrics if key in line]
        label = f"{way} {found[-1].get('metric_name', 'accuracy')}" if found else ""
        if len(found) > 1:
            low, high = found[-1]["ci95"]
            note = f"{label}, of {found[-1]['n']} [{low:.2f}, {high:.2f}]"
            yield _tile(f"{shown(found[0]['accuracy'])} → {shown(found[-1]['accuracy'])}", note)
        elif found:
            low, high = found[0]["ci95"]
            yield _tile(shown(found[0]["accuracy"]), f"{label}, of {found[0]['n']} [{low:.2f}, {high:.2f}]")
    yield _tile(f"{total:,}", "rollouts")
    failed = sum(sum(line.get("failures", {}).values()) for line in metrics)
    yield _tile(f"{failed:,}", "failed in training")
    if metrics and "wall_time_s" in metrics[-1]:
        yield _tile(_duration(metrics[-1]["wall_time_s"]), "wall time")


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _reasons(reasons: Sequence[tuple[str, int]], total: int) -> Iterator[str]:
    if not reasons:
        return
    rows = "".join(
        f'<tr><td class="n">{count:,}</td><td class="n">{count / total:.0%}</td><td>{escape(text)}</td></tr>'
        for text, count in reasons
    )
    yield f"<h2>What became of the rollouts</h2><figure><table>{rows}</table></figure>"


def _browser() -> str:
    return (
        '<h2>Rollouts</h2><div class="controls"><select id="view" aria-label="Which rollouts"></select>'
        '<input id="search" type="search" placeholder="Search questions and queries" aria-label="Search"></div>'
        '<div class="browser" id="browser"><div class="list" id="list"></div>'
        '<div class="detail" id="detail"></div></div>'
    )


def _footer(config: Mapping[str, Any], data: Mapping[str, Any], total: int) -> str:
    shown = len(data["rollouts"])
    every = "all" if shown == total else f"{shown:,} of {total:,}"
    settings = escape(json.dumps(dict(config), indent=1, ensure_ascii=False, default=str))
    return (
        f"<p>Shown here: {every} rollouts. The whole run is in its rollouts.parquet.</p>"
        f"<details><summary>settings</summary><pre>{settings}</pre></details>"
    )
