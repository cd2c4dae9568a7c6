"""The curriculum with verl: its shuffled prompts get the tasks that the pass rates of earlier rollouts draw."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from itertools import cycle

from groundwire import domains
from groundwire.domains import Task
from groundwire.train.algorithms.curriculum import PassRates
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.run_reader import read_pass_rates

__all__ = ["Curriculum"]


class Curriculum:
    """The pass rates of a run's training tasks, and the order that they give for each step. Threads may share it."""

    def __init__(self, tasks: Sequence[Task], rates: PassRates, *, seed: int) -> None:
        self._tasks = {str(task["id"]): task for task in tasks}
        self._rates, self._seed = rates, seed
        self._step = -1
        self._order: Iterator[str] = iter(())
        self._lock = threading.Lock()

    @classmethod
    def of(cls, config: RunConfig, run: RunDir) -> Curriculum:
        """The curriculum of a run, which may be resumed, with the tasks that were written for verl."""
        import pyarrow.parquet as pq

        column = pq.read_table(run.path / "tasks" / "train.parquet", columns=["task"])["task"]
        tasks = [json.loads(task) for task in column.to_pylist()]
        rates = read_pass_rates(run, tasks, domains.get(config.domain).breakdowns)
        return cls(tasks, rates, seed=config.seed)

    def draw(self, step: int) -> Task:
        """The next task of a step."""
        with self._lock:
            if step != self._step:
                self._step = step
                self._order = cycle(self._rates.order(self._tasks, f"{self._seed}/{step}"))
            return self._tasks[next(self._order)]

    def add(self, task: Task, rewards: Sequence[float]) -> None:
        """Count the rewards of a group."""
        with self._lock:
            self._rates.add(str(task["id"]), rewards)
