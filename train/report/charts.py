"""Which figures a run's report draws, as data: the page's SVG and the PNG files are drawn from the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.tools.step_timer import PHASES
from groundwire.train.evaluation.metrics import level_order

__all__ = ["Chart", "Series", "charts"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points (step, value), and for lines the interval [low, high] of each where there is one."""

    name: str
    points: Sequence[tuple[float, float]]
    bands: Sequence[tuple[float, float]] = ()
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Several series over the steps: as lines, or ``stacked`` as bars. ``top`` is the axis's end, where it is fixed."""

    key: str
    title: str
    unit: str
    series: Sequence[Series]
    stacked: bool = False
    top: float | None = None


def charts(
    metrics: Sequence[Mapping[str, Any]], lengths: Mapping[int, Any], components: Mapping[int, Any]
) -> list[Chart]:
    """The charts that have something to show.

    ``metrics`` are the lines of ``metrics.jsonl``. ``lengths`` has for each training step the mean tokens of a reply
    and of a prompt (``{"reply": …, "prompt": …}``), ``components`` the mean of each component of the reward.
    """
    steps = [line for line in metrics if line.get("step", 0) > 0]
    reward = [(line["step"], line["reward"]) for line in steps if line.get("reward") is not None]
    drawn = [
        Chart(
            key="accuracy",
            title="Reward and accuracy",
            unit="share of questions",
            top=1.0 if all(0 <= value <= 1 for _, value in reward) else None,
            series=[
                Series(name="training reward (sampled)", points=reward, faint=True),
                _validation(metrics, "validation", "validation, greedy"),
                _validation(metrics, "validation_sampled", "validation, sampled"),
            ],
        ),
        Chart(
            key="hardness",
            title="Accuracy by hardness",
            unit="share of questions (greedy)",
            top=1.0,
            series=_by_hardness(metrics),
        ),
        Chart(key="reward_components", title="Reward components", unit="mean", series=_named(components)),
        Chart(
            key="length", title="Length of replies and prompts", unit="tokens a call, training", series=_named(lengths)
        ),
        Chart(
            key="failures",
            title="Failures by type",
            unit="rollouts",
            stacked=True,
            series=_stack(steps, "failures", ()),
        ),
        Chart(
            key="time", title="Time of a step", unit="seconds", stacked=True, series=_stack(steps, "seconds", PHASES)
        ),
    ]
    kept = []
    for chart in drawn:
        series = [each for each in chart.series if each.points]
        if series:
            kept.append(
                Chart(
                    key=chart.key,
                    title=chart.title,
                    unit=chart.unit,
                    series=series,
                    stacked=chart.stacked,
                    top=chart.top,
                )
            )
    return kept


def _validation(metrics: Sequence[Mapping[str, Any]], key: str, name: str) -> Series:
    found = [(line["step"], line[key]) for line in metrics if line.get(key, {}).get("accuracy") is not None]
    return Series(
        name=name,
        points=[(step, result["accuracy"]) for step, result in found],
        bands=[(result["ci95"][0], result["ci95"][1]) for _, result in found],
    )


def _by_hardness(metrics: Sequence[Mapping[str, Any]]) -> list[Series]:
    found: dict[str, list[tuple[float, float]]] = {}
    for line in metrics:
        for level, value in line.get("validation", {}).get("by_hardness", {}).items():
            found.setdefault(level, []).append((line["step"], value))
    return [Series(name=level, points=found[level]) for level in sorted(found, key=level_order)]


def _named(values: Mapping[int, Mapping[str, float]]) -> list[Series]:
    """One line for each name among the steps' values."""
    names = list(dict.fromkeys(name for each in values.values() for name in each))
    return [
        Series(name=name, points=[(step, each[name]) for step, each in sorted(values.items()) if name in each])
        for name in names
    ]


def _stack(steps: Sequence[Mapping[str, Any]], key: str, order: Sequence[str]) -> list[Series]:
    """One bar part for each name; every step has all of them, so that they stand on each other."""
    names = list(dict.fromkeys([*order, *(name for line in steps for name in line.get(key, {}))]))
    names = [name for name in names if any(line.get(key, {}).get(name) for line in steps)]
    return [
        Series(name=name, points=[(line["step"], line.get(key, {}).get(name, 0)) for line in steps]) for name in names
    ]
