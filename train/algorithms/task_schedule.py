"""Which tasks a step trains on, and when a further one replaces one that teaches nothing, with both trainers.

The tasks depend on the seed, the step and the rewards of earlier steps only, so a resumed run repeats them.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from groundwire.domains import Task
from groundwire.train.algorithms.credit import TrainingGroup
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.outcome import further_requests, requests_of_step
from groundwire.train.store.rollout import Rollout

RunRollouts = Callable[..., Awaitable[list[Rollout]]]
"""Runs rollouts within the seconds ``deadline_s``, and returns them in order, with their scores."""
Compare = Callable[[Sequence[Rollout]], Sequence[TrainingGroup]]
"""What rollouts train (:func:`.credit.training_items`)."""
_MIN_WEIGHT = 0.02
"""Weight of a task that always or never passes; a task that passes half the time has 0.25."""
_DECAY, _CLASS_DECAY = 0.5, 0.9
"""A group's rollouts count this many times as much when the next group of its task, or of its class, is added."""
_PRIOR = 2.0
"""Rollouts that the pass rate of its class counts for in that of a task, and 0.5 in that of a class."""
_RECENT_STEPS = 5
"""Steps whose share of groups that teach is expected of the next step."""


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
            total, rollouts = self._counts.get(key, (0.0, 0.0))
            self._counts[key] = (decay * total + sum(rewards), decay * rollouts + len(rewards))

    def rate(self, task: str) -> float:
        """The task's recent pass rate, from 0 to 1."""
        return self._mean(("task", task), self._mean(("class", self._classes.get(task, "")), 0.5))

    def weight(self, task: str) -> float:
        """How often the task is sampled, relative to others: ``rate * (1 - rate)``, the variance of a 0/1 reward.

        So tasks that pass half the time come most often, and fewer groups have only equal rewards.
        """
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


class TaskSchedule:
    """The training tasks in the order in which each step draws them. Threads may share it.

    With ``rates`` they are drawn by pass rate (a curriculum), else in shuffled epochs.
    """

    def __init__(self, tasks: Sequence[Task], config: RunConfig, rates: PassRates | None = None) -> None:
        self._tasks, self._config, self._rates = tasks, config, rates
        self._lock = threading.Lock()
        self._drawing: tuple[int, Iterator[Task]] = (-1, iter(()))
        self.most = min(len(tasks), config.most_groups)
        """The most groups of a step, each of another task: those after the first ``tasks_per_step`` replace groups that
        teach nothing."""

    @classmethod
    def of(cls, tasks: Sequence[Task], config: RunConfig, run: RunDir, columns: Iterable[str]) -> TaskSchedule:
        """The schedule of a run, which goes on if the run is resumed. For a curriculum, tasks with the same values in
        ``columns`` are a class.
        """
        if not config.curriculum:
            return cls(tasks, config)
        columns = list(columns)
        classes = {str(task["id"]): "/".join(str(task.get(column)) for column in columns) for task in tasks}
        schedule = cls(tasks, config, PassRates(classes))
        for rollouts in run.rollout_batches(["step", "mode", "task_id", "reward", "further"], []):
            schedule.add_rollouts(rollouts)
        return schedule

    def groups(self, step: int) -> Iterator[list[Rollout]]:
        """The groups of a step in the order in which they start, :attr:`most` of them."""
        return requests_of_step(self._order(step)[: self.most], self._config, step)

    def draw(self, step: int) -> Task:
        """The next task of a step, for a trainer that asks for one at a time; after the last the first again."""
        with self._lock:
            if self._drawing[0] != step:
                self._drawing = (step, cycle(self._order(step)))
            return next(self._drawing[1])

    def add(self, task: str, rewards: Sequence[float]) -> None:
        """Count the rewards of a group of a task."""
        if self._rates is not None:
            with self._lock:
                self._rates.add(task, rewards)

    def add_rollouts(self, rollouts: Iterable[Rollout]) -> None:
        """Count the groups of training rollouts."""
        groups: dict[tuple[int, str], list[float]] = {}
        for rollout in rollouts:
            counts = rollout.mode == "train" and not rollout.further
            if counts and (reward := rollout.outcome.reward) is not None:
                groups.setdefault((rollout.step, str(rollout.task["id"])), []).append(reward)
        for (_, task), rewards in groups.items():
            self.add(task, rewards)

    def groups_to_start(self, metrics: Sequence[Mapping[str, Any]]) -> int:
        """How many groups will probably give ``tasks_per_step`` that teach, by the ``metrics`` of earlier steps."""
        lines = [line for line in metrics[-_RECENT_STEPS:] if "groups_used" in line]
        sampled, used = (sum(line[name] for line in lines) for name in ("groups", "groups_used"))
        if not sampled:
            return min(self.most, self._config.tasks_per_step)
        return min(self.most, math.ceil(self._config.tasks_per_step * sampled / used)) if used else self.most

    def _order(self, step: int) -> list[Task]:
        """All tasks: those of the step, then the others in random order."""
        seed = self._config.seed
        if self._rates is not None:
            by_id = {str(task["id"]): task for task in self._tasks}
            return [by_id[task] for task in self._rates.order(by_id, f"{seed}/{step}")]
        # The next tasks of an endless sequence of shuffled epochs.
        size = min(self._config.tasks_per_step, len(self._tasks))
        epoch, position = divmod(step - 1, len(self._tasks) // size)
        shuffled = list(range(len(self._tasks)))
        random.Random(f"{seed}/{epoch}").shuffle(shuffled)
        first = shuffled[position * size : (position + 1) * size]
        others = [index for index in range(len(self._tasks)) if index not in first]
        random.Random(f"{seed}/{step}/others").shuffle(others)
        return [self._tasks[index] for index in (*first, *others)]


async def run_group(
    run: RunRollouts, group: Sequence[Rollout], *, compare: Compare, further: int, deadline_s: float
) -> list[Rollout]:
    """Run the rollouts of a group and, if its rewards are equal, ``further`` ones; returns all of them in order.

    The rewards of the first ones alone decide, and nothing stops at the first that differs: it would be no sample of
    the policy. :mod:`.credit` has the weights. After ``deadline_s`` seconds no further one starts.
    """
    deadline = time.monotonic() + deadline_s
    ended = await run(group, deadline_s=deadline_s)
    if further and (left_s := deadline - time.monotonic()) > 0 and any(made.is_equal for made in compare(ended)):
        ended = [*ended, *await run(further_requests(group, further), deadline_s=left_s)]
    return ended


async def sample_groups(
    run: RunRollouts,
    groups: Iterable[Sequence[Rollout]],
    *,
    first: int,
    wanted: int,
    compare: Compare,
    further: int = 0,
    deadline_s: float,
) -> list[Rollout]:
    """:func:`run_group` until ``wanted`` of them teach, or no group is left; returns all their rollouts.

    This is dynamic sampling (DAPO, Yu et al. 2025). The first ``first`` groups start at once. A further one starts as
    soon as the running groups cannot be enough. So which groups run depends on the rewards alone, not on the order in
    which rollouts end. After ``deadline_s`` seconds none starts, and those that run end as in
    :meth:`RolloutCollector.run`.
    """
    deadline = time.monotonic() + deadline_s
    waiting = iter(groups)
    started: list[asyncio.Task[list[Rollout]]] = []
    running: set[asyncio.Task[list[Rollout]]] = set()
    teaching = 0
    try:
        while True:
            while len(started) < first or teaching + len(running) < wanted:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or (group := next(waiting, None)) is None:
                    break
                made = run_group(run, group, compare=compare, further=further, deadline_s=left_s)
                started.append(asyncio.ensure_future(made))
                running.add(started[-1])
            if not running:
                return [result for task in started for result in task.result()]
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            teaching += sum(group.teaches for task in ended for group in compare(task.result()))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
