"""A curriculum: tasks are sampled by their recent pass rate, so that fewer groups have only equal rewards."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["PassRates"]

_MIN_WEIGHT = 0.02
"""Weight of a task that always or never passes; a task that passes half the time has 0.25."""
_DECAY, _CLASS_DECAY = 0.5, 0.9
"""A group's rollouts count this many times as much when the next group of its task, or of its class, is added."""
_PRIOR = 2.0
"""Rollouts that the pass rate of its class counts for in that of a task, and 0.5 in that of a class."""


class PassRates:
    """The recent pass rate of each task: the mean reward of its rollouts, from 0 for the least reward that the run has
    given to 1 for the greatest.

    ``classes`` has the class of each task by its id, for example its difficulty. A task without rollouts has the pass
    rate of its class.
    """

    def __init__(self, classes: Mapping[str, str]) -> None:
        self._classes = classes
        self._counts: dict[tuple[str, str], tuple[float, float]] = {}  # (sum of rewards, rollouts) with decay
        self._least, self._greatest = math.inf, -math.inf

    def add(self, task: str, rewards: Sequence[float]) -> None:
        """Count the rewards of one group of a task."""
        self._least, self._greatest = min([self._least, *rewards]), max([self._greatest, *rewards])
        for key, decay in ((("task", task), _DECAY), (("class", self._classes.get(task, "")), _CLASS_DECAY)):
            before = self._counts.get(key, (0.0, 0.0))
            self._counts[key] = (decay * before[0] + sum(rewards), decay * before[1] + len(rewards))

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the groups of training rollouts, rows of ``rollouts.parquet``."""
        groups: dict[tuple[int, str], list[float]] = {}
        for row in rows:
            if row["mode"] == "train" and row["reward"] is not None:
                groups.setdefault((row["step"], row["task_id"]), []).append(row["reward"])
        for (_, task), rewards in groups.items():
            self.add(task, rewards)

    def rate(self, task: str) -> float:
        """The task's recent pass rate, from 0 to 1."""
        prior = self._mean(("class", self._classes.get(task, "")), 0.5)
        return self._mean(("task", task), prior)

    def weight(self, task: str) -> float:
        """How often the task is sampled, relative to others: ``rate * (1 - rate)``, the variance of a 0/1 reward."""
        rate = self.rate(task)
        return rate * (1 - rate) + _MIN_WEIGHT

    def order(self, tasks: Iterable[str], seed: str) -> list[str]:
        """The tasks, drawn one after another by their weights without replacement (Efraimidis and Spirakis 2006)."""
        draw = random.Random(seed)
        keys = {task: draw.random() ** (1 / self.weight(task)) for task in tasks}
        return sorted(keys, key=keys.__getitem__, reverse=True)

    def _mean(self, key: tuple[str, str], prior: float) -> float:
        total, rollouts = self._counts.get(key, (0.0, 0.0))
        low, high = self._least, self._greatest
        if low >= high:  # nothing is known yet but that rewards are usually from 0 to 1
            low, high = min(0.0, low), max(1.0, high)
        passed = (total - low * rollouts) / (high - low)
        return (passed + _PRIOR * prior) / (rollouts + _PRIOR)
