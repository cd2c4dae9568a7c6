"""Score the stored rollouts of a run with another reward, without sampling again.

A rollout's row holds the task, the answer and the agent's steps, which is all that a reward needs. The trainer learns
only from groups whose rewards differ, so the result lists the groups that gain or lose their gradient.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.rewards._neighbours import in_training
from groundwire.rewards._scoring import Score, map_concurrently, score
from groundwire.rewards._types import Reward, declared_range

__all__ = ["COLUMNS", "RIGHT", "RescoredGroup", "RescoredRollout", "RescoredRun", "rescore"]

COLUMNS = ("step", "mode", "group", "task_id", "rollout_id", "status", "reward", "task", "answer", "agent_steps")
"""The columns of ``rollouts.parquet`` that :func:`rescore` needs."""

RIGHT = 0.5
"""A rollout counts as right above this reward, which leaves out partial credit for a wrong answer."""
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class RescoredRollout:
    """A rollout under both rewards; ``new`` is None where the new reward raised ``error``."""

    step: int
    mode: str
    group: str
    task: str
    rollout: str
    question: str
    answer: str
    old: float
    new: float | None
    error: str = ""

    @property
    def flips(self) -> bool:
        """Whether it is right under one reward and wrong under the other."""
        return self.new is not None and (self.old > RIGHT) != (self.new > RIGHT)


@dataclass(frozen=True, kw_only=True)
class RescoredGroup:
    """The rewards of one task's training rollouts in one step, in the run's order, without failures."""

    step: int
    group: str
    old: list[float]
    new: list[float]

    @property
    def had_gradient(self) -> bool:
        """Whether the old rewards differ."""
        return _differ(self.old)

    @property
    def has_gradient(self) -> bool:
        """Whether the new rewards differ."""
        return _differ(self.new)


@dataclass(frozen=True, kw_only=True)
class RescoredRun:
    """``failed`` counts the rollouts that failed in the run without a reward; they stay left out."""

    rollouts: list[RescoredRollout]
    groups: list[RescoredGroup]
    failed: int


async def rescore(
    rows: Iterable[Mapping[str, Any]], reward: Reward, *, on_end: Callable[[], None] = lambda: None
) -> RescoredRun:
    """Score ``rows``, which have :data:`COLUMNS`, with ``reward``. ``on_end`` is called after each rollout.

    Rollouts of training are judged as in training. A failure that scored in the run has no answer: it scores the least
    of the new rewards, or 0 if none is lower.

    Raises ``ValueError`` for a row without a task or steps.
    """
    rows = list(rows)
    kept = [_parse_row(row) for row in rows if row.get("reward") is not None]

    async def score_rollout(item: tuple[Mapping[str, Any], dict[str, Any], list[Any]]) -> Score:
        row, task, steps = item
        if row["status"] != "succeeded":
            return Score(math.inf)
        with in_training(row["mode"] == "train"):
            return await score(reward, task, row["answer"], steps)

    scores = await map_concurrently(score_rollout, kept, on_end=on_end)
    least = min([0.0, declared_range(reward)[0], *(each.value for each in scores if each.value is not None)])
    scores = [Score(least) if each.value == math.inf else each for each in scores]
    rollouts = [
        RescoredRollout(
            step=row["step"],
            mode=row["mode"],
            group=row["group"],
            task=row["task_id"],
            rollout=row["rollout_id"],
            question=str(task.get("question", "")),
            answer=row["answer"],
            old=row["reward"],
            new=scored.value,
            error=scored.error,
        )
        for (row, task, _), scored in zip(kept, scores, strict=True)
    ]
    members: dict[tuple[int, str], list[RescoredRollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.mode == "train":
            members[rollout.step, rollout.group].append(rollout)
    groups = [
        RescoredGroup(
            step=step,
            group=name,
            old=[each.old for each in group],
            new=[each.new for each in group if each.new is not None],
        )
        for (step, name), group in sorted(members.items())
    ]
    return RescoredRun(rollouts=rollouts, groups=groups, failed=len(rows) - len(kept))


def _parse_row(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any], list[Any]]:
    try:
        return row, json.loads(row["task"]), json.loads(row["agent_steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"rollout {row.get('rollout_id')!r} has no task and steps to score: {error}") from error


def _differ(rewards: Sequence[float]) -> bool:
    """Whether a group has a gradient. A single rollout is compared with 0, as in the trainers."""
    compared = rewards if len(rewards) > 1 else [0.0, *rewards]
    return max(compared) - min(compared) > _TOLERANCE
