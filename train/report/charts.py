"""The charts of a run as data; :mod:`groundwire.train.report.plots` draws them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.tools.step_timer import PHASES
from groundwire.train.evaluation.validation import VALIDATIONS

__all__ = ["Chart", "Series", "accuracy_chart", "charts"]

Metrics = Sequence[Mapping[str, Any]]
_HEALTH = (
    ("shares", "Health: shares", "share", ("gradient_share", "clip_fraction", "truncated_share", "unchecked_share")),
    ("entropy", "Health: entropy", "nats per token", ("entropy",)),
    ("divergence", "Health: KL divergence from the sampler", "nats per token", ("sampler_kl", "kl")),
    ("gradient", "Health: gradient norm", "norm", ("grad_norm",)),
    ("tokens", "Tokens of a step", "tokens", ("tokens_generated", "tokens_trained")),
)
"""Key, title and unit of a chart, and its figures, which :mod:`groundwire.train.algorithms.health` describes."""
_OTHER_KEYS = ("accuracy", "reward_components", "length", "failures", "time", *(key for key, *_ in _HEALTH))


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points (step, value); ``bands`` has the interval [low, high] of each, or is empty."""

    name: str
    points: Sequence[tuple[float, float]]
    bands: Sequence[tuple[float, float]] = ()
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Several series over the steps: lines, or ``stacked`` bars. ``top`` is a fixed upper end of the value axis."""

    key: str
    title: str
    unit: str
    series: Sequence[Series]
    stacked: bool = False
    top: float | None = None


def charts(metrics: Metrics, lengths: Mapping[int, Any], components: Mapping[int, Any]) -> list[Chart]:
    """The charts that have data.

    ``metrics`` are the lines of ``metrics.jsonl``. ``lengths`` has for each training step the mean tokens of a reply
    and of a prompt (``{"reply": …, "prompt": …}``), ``components`` the mean of each component of the reward.
    """
    steps = [line for line in metrics if line.get("step", 0) > 0]
    made = [
        accuracy_chart(metrics),
        *_breakdown_charts(metrics),
        Chart(key="reward_components", title="Reward components", unit="mean", series=_lines(components)),
        Chart(key="length", title="Length of replies and prompts", unit="tokens per call", series=_lines(lengths)),
        *(
            Chart(key=key, title=title, unit=unit, series=_lines(_figures(steps, names)))
            for key, title, unit, names in _HEALTH
        ),
        Chart(key="failures", title="Failures by type", unit="rollouts", stacked=True, series=_bars(steps, "failures")),
        Chart(key="time", title="Time of a step", unit="seconds", stacked=True, series=_bars(steps, "seconds", PHASES)),
    ]
    return [chart for chart in made if chart.series]


def accuracy_chart(metrics: Metrics) -> Chart:
    """Training reward, and validation accuracy with its confidence interval; without series if there is no data."""
    rewards = [(line["step"], line["reward"]) for line in metrics if line.get("reward") is not None]
    series = [
        Series(name="training reward (sampled)", points=rewards, faint=True),
        *(_validation(metrics, key, f"validation, {way}") for key, way in VALIDATIONS.items()),
    ]
    values = [value for each in series for _, value in each.points]
    graded = any(line.get(key, {}).get("metric_name") == "mean reward" for line in metrics for key in VALIDATIONS)
    return Chart(
        key="accuracy",
        title="Reward and accuracy",
        unit="mean reward" if graded else "share of questions",
        top=None if graded or any(not 0 <= value <= 1 for value in values) else 1.0,
        series=[each for each in series if each.points],
    )


def _validation(metrics: Metrics, key: str, name: str) -> Series:
    measured = [(line["step"], line[key]) for line in metrics if line.get(key, {}).get("accuracy") is not None]
    return Series(
        name=name,
        points=[(step, result["accuracy"]) for step, result in measured],
        bands=[(result["ci95"][0], result["ci95"][1]) for _, result in measured],
    )


def _breakdown_charts(metrics: Metrics) -> list[Chart]:
    """A chart for each ``by_<column>`` of the greedy validation. Its key, a file name, differs from all others."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in metrics:
        for key, parts in line.get("validation", {}).items():
            if key.startswith("by_"):
                for name, part in parts.items():
                    found.setdefault(key, {}).setdefault(name, []).append((line["step"], part["accuracy"]))
    return [
        Chart(
            key=key if (column := key.removeprefix("by_")) in _OTHER_KEYS else re.sub(r"[^\w-]", "_", column),
            title=f"Accuracy {key.replace('_', ' ')}",
            unit="share of questions (greedy)",
            top=None if any(value > 1 for points in parts.values() for _, value in points) else 1.0,
            series=[Series(name=name, points=points) for name, points in parts.items()],
        )
        for key, parts in found.items()
    ]


def _lines(values: Mapping[int, Mapping[str, float]]) -> list[Series]:
    names = dict.fromkeys(name for each in values.values() for name in each)
    return [
        Series(name=name, points=[(step, each[name]) for step, each in sorted(values.items()) if name in each])
        for name in names
    ]


def _figures(steps: Metrics, names: Sequence[str]) -> dict[int, dict[str, float]]:
    """The figures with these names that each step has."""
    return {line["step"]: {name: line[name] for name in names if line.get(name) is not None} for line in steps}


def _bars(steps: Metrics, key: str, order: Sequence[str] = ()) -> list[Series]:
    """A series for each name that is not always 0, with a value for each step."""
    names = dict.fromkeys([*order, *(name for line in steps for name in line.get(key, {}))])
    return [
        Series(name=name, points=[(line["step"], line.get(key, {}).get(name, 0)) for line in steps])
        for name in names
        if any(line.get(key, {}).get(name) for line in steps)
    ]
