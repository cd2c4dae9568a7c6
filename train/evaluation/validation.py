"""Accuracy on held-out tasks, measured with the same agent, proxy and reward that training uses."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groundwire.domains import Task

if TYPE_CHECKING:
    from groundwire.train.config.run_config import RunConfig
    from groundwire.train.rollouts.outcome import RolloutRequest, RolloutResult

__all__ = [
    "JUDGED_FAILURES",
    "accuracy",
    "choose_tasks",
    "is_judged",
    "shown",
    "validation_jobs",
    "validation_missing",
    "validation_name",
    "validation_temperatures",
    "wilson",
]

JUDGED_FAILURES = {"prompt_too_long", "agent"}
"""Failures that are the agent's own: it had its chance and gave no answer. Others say nothing about the policy."""


def is_judged(rollout: Mapping[str, Any]) -> bool:
    """Whether a rollout (a row of ``rollouts.parquet``) says something about the policy."""
    return rollout["reward"] is not None or rollout["status"] in JUDGED_FAILURES


def validation_name(temperature: float) -> str:
    """What a validation at ``temperature`` is called in metrics and summaries: ``validation`` is the greedy one."""
    return "validation" if temperature == 0 else "validation_sampled"


def validation_temperatures(config: RunConfig, step: int) -> list[float]:
    """Temperatures of the local trainer's validations at a step; before and after training one is sampled."""
    if step in (0, config.steps):
        return [0.0, config.temperature] if config.val_temperature == 0 else [config.val_temperature]
    return [config.val_temperature] if config.val_every and step % config.val_every == 0 else []


def validation_missing(config: RunConfig, line: Mapping[str, Any]) -> bool:
    """Whether the local trainer was stopped between a step and its validation: ``line`` lacks one that was due."""
    return any(
        validation_name(temperature) not in line for temperature in validation_temperatures(config, line["step"])
    )


def shown(value: float | None) -> str:
    """An accuracy as it is shown; ``-`` where nothing could be judged."""
    return "-" if value is None else f"{value:.3f}"


def choose_tasks(tasks: Sequence[Task], count: int) -> list[Task]:
    """``count`` tasks (0 is all), spread evenly over the sequence, which is sorted by database: every run and seed
    judges the same questions."""
    if count <= 0 or count >= len(tasks):
        return list(tasks)
    return [tasks[int((i + 0.5) * len(tasks) / count)] for i in range(count)]


def validation_jobs(tasks: Iterable[Task], *, temperature: float, max_tokens: int, seed: int) -> list[RolloutRequest]:
    """One rollout a task, at ``temperature`` (0 is greedy)."""
    from groundwire.train.rollouts.outcome import (
        RolloutRequest,  # with the store: those who only count rollouts do without
    )

    return [
        RolloutRequest(
            task=task,
            group=str(task["id"]),
            mode="val",
            sampling={"temperature": temperature, "max_tokens": max_tokens, "seed": seed * 1_000_003 + index},
        )
        for index, task in enumerate(tasks)
    ]


def accuracy(outcomes: Sequence[RolloutResult]) -> dict[str, Any]:
    """Accuracy (the mean reward), overall and by hardness and subject, with its 95 % interval and the failures by type.

    ``compute_metrics`` is what to call it: a reward that grades is no accuracy.

    The interval is Wilson's (1927) for a proportion where each reward is 0 or 1, else the mean's own (normal).
    Infrastructure failures are left out and counted; where nothing else is there, the accuracy is None.
    """
    judged = [(o, o.reward or 0.0) for o in outcomes if o.succeeded or o.status in JUDGED_FAILURES]
    by: dict[str, dict[str, list[float]]] = {"hardness": defaultdict(list), "subject_split": defaultdict(list)}
    for outcome, score in judged:
        for key, groups in by.items():
            if outcome.request.task.get(key) is not None:
                groups[str(outcome.request.task[key])].append(score)
    scores = [score for _, score in judged]
    return {
        "accuracy": _mean(scores),
        "metric_name": "accuracy" if _right_or_wrong(scores) else "mean reward",
        "ci95": _interval(scores),
        "n": len(scores),
        "total": len(outcomes),
        **{f"by_{key}": {name: _mean(groups[name]) for name in sorted(groups)} for key, groups in by.items() if groups},
        "calls_per_rollout": _mean([float(len(o.calls)) for o, _ in judged]),
        "failures": dict(Counter(o.status for o in outcomes if not o.succeeded)),
    }


def wilson(successes: float, n: int, z: float = 1.96) -> list[float]:
    """The interval [low, high] of a proportion with ``successes`` out of ``n``; [0, 1] for none."""
    if n == 0:
        return [0.0, 1.0]
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [round(max(0.0, centre - half), 4), round(min(1.0, centre + half), 4)]


def _right_or_wrong(scores: Sequence[float]) -> bool:
    return set(scores) <= {0.0, 1.0}


def _interval(scores: Sequence[float]) -> list[float]:
    if _right_or_wrong(scores):
        return wilson(sum(scores), len(scores))
    mean = sum(scores) / len(scores)
    half = 1.96 * statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
    return [round(mean - half, 4), round(mean + half, 4)]


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
