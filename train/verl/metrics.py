"""Writes a run's ``metrics.jsonl`` from ``verl.jsonl`` (verl's log) and ``rollouts.jsonl`` (the rollout service's).

The lines have the same fields as the local trainer's; ``verl`` holds everything that verl logged for the step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import NotRequired, TypedDict

from groundwire.tools.files import first_error, parse_json, read_bytes
from groundwire.tools.step_timer import PHASES
from groundwire.train.algorithms.health import HealthRules, step_figures
from groundwire.train.artifacts.run_dir import RunDir

_MAX_BYTES = 1 << 30


class _Line(TypedDict):
    """A line of verl's log, with ``data``, or of ours, with the ``partition`` and numbers."""

    step: int
    data: NotRequired[dict[str, Any]]
    partition: NotRequired[str]


_LINE = TypeAdapter(_Line)
_COUNTS = ("groups", "groups_used", "groups_replaced", "without_calls", "rollouts_trained", "tokens_trained")
_FIGURES = {
    "entropy": "actor/entropy",
    "probability_difference": "training/rollout_probs_diff_mean",
    "sampler_kl": "rollout_corr/k3_kl",
    "kl": "actor/ppo_kl",
    "kl_reference": "actor/kl_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "grad_norm": "actor/grad_norm",
}
"""verl's names of the keys of :class:`groundwire.train.artifacts.metrics_lines.MetricsLine` that it has."""
_LOG, _ARCHIVE = "verl.jsonl", "verl-before.jsonl"


def write_metrics(run: RunDir) -> None:
    """Write ``metrics.jsonl`` anew, one line per step."""
    logged: dict[int, dict[str, Any]] = {}
    for line in _verl_lines(run.path):
        logged.setdefault(int(line["step"]), {}).update(line["data"])
    rollouts = {
        (int(line["step"]), line["partition"]): line for line in _read_lines(run.path / "rollouts.jsonl", "partition")
    }
    lines, wall_time_s = [], 0.0
    for step, data in sorted(logged.items()):
        wall_time_s += float(data.get("timing_s/step", 0.0)) + float(data.get("timing_s/testing", 0.0))
        lines.append(
            _metrics_line(step, data, rollouts.get((step, "train"), {}), rollouts.get((step, "val"), {}), wall_time_s)
        )
    run.write_metrics(lines)


@contextmanager
def follow_verl_log(run: RunDir, on_note: Callable[[str], None], interval_s: float = 2.0) -> Iterator[None]:
    """Update ``metrics.jsonl`` from a thread whenever verl's log has grown; ``on_note`` gets the health warnings."""
    stopped, rules = threading.Event(), HealthRules(run.metrics())

    def follow() -> None:
        last_size = 0
        while not stopped.wait(interval_s):
            with suppress(FileNotFoundError):
                size = (run.path / _LOG).stat().st_size
                if size != last_size:
                    last_size = size
                    write_metrics(run)
                    for line in run.metrics():
                        for warning in rules.check(line) if line["step"] >= rules.last_step else ():
                            on_note(warning)

    thread = threading.Thread(target=follow, name="follow-verl-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def last_probability_difference(run: RunDir) -> float | None:
    """Mean absolute difference of the sampler's and the trainer's token probabilities in the last line of verl's log.

    None if that step did not measure it.
    """
    lines = _read_lines(run.path / _LOG, "data")
    value = lines[-1]["data"].get(_FIGURES["probability_difference"]) if lines else None
    return value if _is_finite(value) else None


def archive_verl_log(run: RunDir) -> None:
    """Move the log of an interrupted run out of the way: verl overwrites its log in every process."""
    if (run.path / _LOG).exists():
        run.write_json_lines(_ARCHIVE, _verl_lines(run.path))
        (run.path / _LOG).unlink()


def _verl_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The archived and the current log; archived steps that the resumed run repeated are left out."""
    current = _read_lines(run_dir / _LOG, "data")
    first = min((int(line["step"]) for line in current if "timing_s/step" in line["data"]), default=None)
    archived = _read_lines(run_dir / _ARCHIVE, "data")
    return [line for line in archived if first is None or int(line["step"]) < first] + current


def _metrics_line(
    step: int, logged: Mapping[str, Any], trained: Mapping[str, Any], validated: Mapping[str, Any], wall_time_s: float
) -> dict[str, Any]:
    line: dict[str, Any] = {"step": step}
    if step > 0:
        sampled, step_s = trained.get("tokens_sampled", 0), float(logged.get("timing_s/step", 0.0))
        failed = {name: count for name, count in trained.items() if name.startswith(("dropped_", "zero_"))}
        line |= {
            "reward": trained.get("reward_mean"),
            "rollouts": trained.get("ended", 0),
            "failures": {name.partition("_")[2]: count for name, count in failed.items()},
            "dropped": trained.get("dropped", 0),
            "groups_skipped": trained.get("groups_skipped", 0),
            **{name: trained[name] for name in _COUNTS if name in trained},
            **({"entropy": trained["entropy"]} if "entropy" in trained else {}),
            **{name: logged[key] for name, key in _FIGURES.items() if _is_finite(logged.get(key))},
            **({"updates_skipped": 1} if not _is_finite(logged.get(_FIGURES["grad_norm"], 0.0)) else {}),
            **step_figures(trained, trained),
            "retried": trained.get("retried", 0),
            "calls": trained.get("calls", 0),
            "tokens_generated": sampled,
            "tokens_per_s": round(sampled / step_s, 1) if step_s else 0.0,
            "seconds": dict(trained.get("seconds") or dict.fromkeys(PHASES, 0.0)),
        }
    line |= {name: validated[name] for name in ("validation", "validation_sampled") if name in validated}
    return {**line, "wall_time_s": round(wall_time_s, 2), "verl": dict(logged)}


def _is_finite(value: Any) -> bool:
    """Whether it is a number; verl logs null for one that is not finite, the mean of a step with a skipped update."""
    return isinstance(value, int | float) and math.isfinite(value)


def _read_lines(path: Path, key: str) -> list[dict[str, Any]]:
    lines = []
    with suppress(FileNotFoundError):
        for text in read_bytes(path, max_bytes=_MAX_BYTES).splitlines():
            with suppress(ValueError):  # a kill may truncate the last line
                if not first_error(_LINE, line := parse_json(text)) and key in line:
                    lines.append(line)
    return lines
