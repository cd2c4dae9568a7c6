"""The processes beside verl's trainer, for work that would take that process's time."""

from __future__ import annotations

import math
from typing import Any

from groundwire.train.verl.rollout_workers import RolloutWorker
from groundwire.train.verl.transfer_queue import RowWriter

__all__ = ["WorkerProcesses", "start_actor"]


class WorkerProcesses:
    """``rollout`` processes of :class:`.RolloutWorker`, and one of :class:`.RowWriter` for every eight of them.

    They start at once: their imports take up to 40 s on a slow processor.
    """

    def __init__(self, rollout: int) -> None:
        # A rollout of one call takes 8 ms of a process, and its row 0.6 ms of a writer.
        self.row_writers = [start_actor(RowWriter, restarts=True) for _ in range(math.ceil(rollout / 8))]
        self._rollout = [start_actor(RolloutWorker) for _ in range(rollout)]
        for worker in self._rollout:
            worker.load.remote()

    def rollout_worker(self) -> Any:
        """A worker that is not in use, or a new one."""
        return self._rollout.pop() if self._rollout else start_actor(RolloutWorker)


def start_actor(kind: type, *, restarts: bool = False) -> Any:
    """An actor of Ray of the class ``kind``, on this host.

    With ``restarts`` Ray starts it again when its process ends, and repeats its open calls.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    forever = -1 if restarts else 0
    actor = ray.remote(kind).options(
        num_cpus=0, max_restarts=forever, max_task_retries=forever, scheduling_strategy=here
    )
    return actor.remote()
