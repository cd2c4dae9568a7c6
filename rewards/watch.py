"""Watch a reward in training: a stricter reward is computed on a few of the rollouts that won.

A policy that learns to exploit a reward wins more and more rollouts that the stricter reward does not confirm.
:mod:`groundwire.train.algorithms.health` warns of that.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from typing_extensions import TypedDict

from groundwire.rewards._scoring import Score, map_concurrently, score
from groundwire.rewards._types import Reward
from groundwire.rewards.rescore import RIGHT

__all__ = ["Example", "RewardWatch", "Watched", "merge"]

_COST = 0.04
"""The share of the training time that the watch may take."""
_FIRST, _MOST = 4, 16
"""Rollouts that are watched in the first step, before their cost is known, and in any step at most."""
_EXAMPLES = 3
_ANSWER_CHARS = 300


class Example(TypedDict):
    """A rollout that won and that the stricter reward does not confirm; ``answer`` is shortened."""

    task_id: str
    rollout_id: str
    answer: str
    reward: float
    watch_reward: float


class Watched(TypedDict):
    """What the stricter ``reward`` says of the winning ``rollouts`` that it judged, best-paid examples first.

    ``failed`` counts those that it could not judge; they are in no other number, and ``error`` is the first message.
    """

    reward: str
    rollouts: int
    unconfirmed: int
    failed: int
    error: str
    examples: list[Example]


class RewardWatch:
    """Judges winning rollouts again, as many as cost less than 5 % of the time since the watch was made."""

    def __init__(self, name: str, reward: Reward, *, seed: int = 0) -> None:
        self.name, self._reward, self._seed = name, reward, seed
        self._started, self._spent_s, self._judged = time.monotonic(), 0.0, 0

    async def check(self, rows: Iterable[Mapping[str, Any]], step: int) -> Watched | None:
        """Judge a sample of the ``rows`` (of ``rollouts.parquet``) that won; None if none can be judged now.

        A rollout won if its reward is above 0.5. Which of them are taken is chance: the best-paid ones may be right by
        both rewards, where another reward than the right answer's adds to theirs.
        """
        chosen = _sample(rows, self._affordable(), random.Random(f"{self._seed}/{step}"))
        if not chosen:
            return None
        began = time.monotonic()
        scores = await map_concurrently(self._judge, chosen, on_end=lambda: None)
        self._spent_s += time.monotonic() - began
        self._judged += len(chosen)
        return _summary(self.name, chosen, scores)

    def _affordable(self) -> int:
        if not self._judged:
            return _FIRST
        left_s = _COST * (time.monotonic() - self._started) - self._spent_s
        return max(0, min(_MOST, int(left_s * self._judged / max(self._spent_s, 1e-9))))

    async def _judge(self, row: Mapping[str, Any]) -> Score:
        return await score(self._reward, json.loads(row["task"]), row["answer"], json.loads(row["agent_steps"]))


def _sample(rows: Iterable[Mapping[str, Any]], count: int, rng: random.Random) -> list[Mapping[str, Any]]:
    """``count`` winning rollouts: a random one of each group, then a second of each, and so on."""
    groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["mode"] == "train" and row["status"] == "succeeded" and (row["reward"] or 0.0) > RIGHT:
            groups[row["group"]].append(row)
    ordered = list(groups.values())
    for group in ordered:
        rng.shuffle(group)
    rng.shuffle(ordered)
    return [row for rank in zip_longest(*ordered) for row in rank if row is not None][:count]


def _summary(name: str, rows: Sequence[Mapping[str, Any]], scores: Sequence[Score]) -> Watched:
    judged = [(row, each.value) for row, each in zip(rows, scores, strict=True) if each.value is not None]
    unconfirmed = [
        Example(
            task_id=row["task_id"],
            rollout_id=row["rollout_id"],
            answer=row["answer"][:_ANSWER_CHARS],
            reward=row["reward"],
            watch_reward=value,
        )
        for row, value in judged
        if value <= RIGHT
    ]
    return Watched(
        reward=name,
        rollouts=len(judged),
        unconfirmed=len(unconfirmed),
        failed=len(rows) - len(judged),
        error=next((each.error[:_ANSWER_CHARS] for each in scores if each.value is None), ""),
        examples=best_paid(unconfirmed),
    )


def best_paid(examples: Iterable[Example]) -> list[Example]:
    """At most three, of different tasks where there are some; the stricter reward's lowest first among equals."""
    ordered = sorted(examples, key=lambda each: (-each["reward"], each["watch_reward"]))
    first = {each["task_id"]: each for each in reversed(ordered)}
    others = [each for each in ordered if first[each["task_id"]] is not each]
    return [*sorted(first.values(), key=ordered.index), *others][:_EXAMPLES]


def merge(one: Watched | None, other: Watched | None) -> Watched | None:
    """The sum of what was watched in two parts of a step."""
    if one is None or other is None:
        return one or other
    return Watched(
        reward=one["reward"],
        rollouts=one["rollouts"] + other["rollouts"],
        unconfirmed=one["unconfirmed"] + other["unconfirmed"],
        failed=one["failed"] + other["failed"],
        error=one["error"] or other["error"],
        examples=best_paid([*one["examples"], *other["examples"]]),
    )
