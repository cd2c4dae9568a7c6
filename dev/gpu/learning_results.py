"""The figures of the learning parts: paired differences, classes of errors, and what a training run logged."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from groundwire.rewards.spider.execution_match import execution_match
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.metrics import RIGHT, compare
from groundwire.train.evaluation.run_reader import read_speed
from groundwire.train.store.rollout import Rollout

__all__ = ["Scores", "differences", "error_classes", "training_figures"]

Scores = Mapping[str, Sequence[float]]
"""The scores of each question's samples, by its id."""
_SQL_ERRORS = ("no such column", "no such table", "ambiguous column", "syntax error", "unrecognized token")


def differences(stages: Mapping[str, Scores]) -> dict[str, dict[str, Any]]:
    """The paired differences of an agent's stages: ``zero``, ``sft``, ``seed 0``, ..., variants of the first seed, and
    the controls ``SFT for longer …``.

    ``all seeds`` is the mean over the seeds of each question.
    """
    seeds = sorted(name for name in stages if name.startswith("seed "))
    controls = sorted(name for name in stages if name.startswith("SFT for longer"))
    variants = [name for name in stages if name not in ("zero", "sft", *seeds, *controls)]
    pairs = [("zero", "sft"), *(("sft", name) for name in (*seeds, *variants, *controls))]
    pairs += [(seed, name) for seed in seeds[:1] for name in variants]
    pairs += [(control, seed) for control in controls for seed in seeds]
    found = {f"{a} -> {b}": _compared(stages[a], stages[b]) for a, b in pairs if a in stages and b in stages}
    together = defaultdict[str, list[float]](list)
    for seed in seeds:
        for task, scores in stages[seed].items():
            together[task] += scores
    for base in ("sft", *controls) if len(seeds) > 1 else ():
        # A mean over seeds beats a single 0 more often than it loses against a 1, which McNemar's test takes for a win.
        if base in stages:
            compared = _compared(stages[base], together) | {"p": _normal_p(stages[base], together)}
            found[f"{base} -> all seeds"] = compared
    return found


def _compared(before: Scores, after: Scores) -> dict[str, Any]:
    try:
        found = compare(before, after)
    except ValueError as error:
        return {"error": str(error)}
    return found | {name: len(found[name]) for name in ("won", "lost")}


def _normal_p(before: Scores, after: Scores) -> float:
    """Two-sided p-value of the mean difference of a question (normal approximation)."""
    changes = [mean(after[task]) - mean(before[task]) for task in before if task in after]
    error = stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else 0.0
    return math.erfc(abs(mean(changes)) / error / math.sqrt(2)) if error else 1.0


def error_classes(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """How many wrong answers failed in which way; of SQL queries by the database's message."""
    wrong = [rollout for rollout in rollouts if (rollout.outcome.reward or 0.0) <= RIGHT]
    return dict(Counter(map(_error_class, wrong)).most_common())


def _error_class(rollout: Rollout) -> str:
    task, answer = rollout.task, rollout.outcome.answer
    if rollout.outcome.failure:
        return rollout.outcome.failure
    if "db_path" not in task or "query" not in task:
        return "wrong"
    if not answer.strip():
        return "no query"
    found = execution_match(answer, task["query"], task["db_path"])
    if found.reason.startswith(("the results ", "the prediction reads ")):  # it ran
        return found.reason
    return next((name for name in _SQL_ERRORS if name in found.reason), "another error")


def training_figures(run: RunDir) -> dict[str, Any]:
    """Steps, their seconds by phase, entropy, reward, and the share of groups that had a gradient."""
    lines = [line for line in run.metrics() if line["step"] > 0]
    if not lines:
        return {"steps": 0}
    phases = {name for line in lines for name in line["seconds"]}
    groups = sum(line.get("groups", 0) for line in lines)
    return {
        **(read_speed(run) or {}),
        "seconds": {name: round(mean(line["seconds"].get(name, 0.0) for line in lines), 3) for name in sorted(phases)},
        "groups_with_gradient": round(sum(line.get("groups_used", 0) for line in lines) / max(1, groups), 4),
        **{
            name: [line.get(name) for line in lines]
            for name in ("reward", "entropy", "truncated_share", "groups_used", "rollouts")
        },
        "step_s": [round(_step_s(line), 2) for line in lines],
    }


def _step_s(line: Mapping[str, Any]) -> float:
    return float(line["verl"]["timing_s/step"] if "verl" in line else sum(line["seconds"].values()))
