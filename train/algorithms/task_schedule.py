"""Which tasks a step trains on, and when a further one replaces one that teaches nothing, with both trainers.

The tasks of a step depend on the seed and the step only, so a resumed run repeats them.
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
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.outcome import requests_of_step
from groundwire.train.store.rollout import Rollout

_RECENT_STEPS = 5  # steps whose share of groups that teach is expected of the next step


class TaskSchedule:
    """The training tasks in the order in which each step draws them: shuffled epochs. Threads may share it."""

    def __init__(self, tasks: Sequence[Task], config: RunConfig) -> None:
        self._tasks, self._config = tasks, config
        self._lock = threading.Lock()
        self._drawing: tuple[int, Iterator[Task]] = (-1, iter(()))
        self.most = min(len(tasks), config.most_groups)
        """The most groups of a step, each of another task: those after the first ``tasks_per_step`` replace groups that
        teach nothing."""

    def groups(self, step: int) -> Iterator[list[Rollout]]:
        """The groups of a step in the order in which they start, :attr:`most` of them."""
        return requests_of_step(self._order(step)[: self.most], self._config, step)

    def draw(self, step: int) -> Task:
        """The next task of a step, for a trainer that asks for one at a time; after the last the first again."""
        with self._lock:
            if self._drawing[0] != step:
                self._drawing = (step, cycle(self._order(step)))
            return next(self._drawing[1])

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
        # The next tasks of an endless sequence of shuffled epochs.
        size = min(self._config.tasks_per_step, len(self._tasks))
        epoch, position = divmod(step - 1, len(self._tasks) // size)
        shuffled = list(range(len(self._tasks)))
        random.Random(f"{seed}/{epoch}").shuffle(shuffled)
        first = shuffled[position * size : (position + 1) * size]
        others = [index for index in range(len(self._tasks)) if index not in first]
        random.Random(f"{seed}/{step}/others").shuffle(others)
        return [self._tasks[index] for index in (*first, *others)]


async def sample_groups(
    run: Callable[..., Awaitable[list[Rollout]]],
    groups: Iterable[Sequence[Rollout]],
    *,
    first: int,
    wanted: int,
    compare: Callable[[Sequence[Rollout]], Sequence[TrainingGroup]],
    deadline_s: float,
) -> list[Rollout]:
    """Run groups until ``wanted`` of them teach, or no group is left; returns all their rollouts.

    This is dynamic sampling (DAPO, Yu et al. 2025). The first ``first`` groups start at once. A further one starts as
    soon as the running groups cannot be enough. So which groups run depends on the rewards alone, not on the order in
    which rollouts end. After ``deadline_s`` seconds none starts, and those that run end as in
    :meth:`RolloutCollector.run`, which is ``run``; ``compare`` says what a group trains
    (:func:`.credit.training_items`).
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
                started.append(asyncio.ensure_future(run(group, deadline_s=left_s)))
                running.add(started[-1])
            if not running:
                return [result for task in started for result in task.result()]
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            teaching += sum(group.teaches for task in ended for group in compare(task.result()))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
