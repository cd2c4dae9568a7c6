"""The processes beside verl's trainer, for work that would take that process's time."""

from __future__ import annotations

from typing import Any

from groundwire.train.verl.generation_workers import GenerationWorker
from groundwire.train.verl.ray_actor import start_actor
from groundwire.train.verl.transfer_queue import RowWriter

__all__ = ["WorkerProcesses"]


class WorkerProcesses:
    """``generation`` processes of :class:`.GenerationWorker`, and one of :class:`.RowWriter`.

    They start at once: their imports take up to 40 s on a slow processor.
    """

    def __init__(self, generation: int) -> None:
        self.row_writer = start_actor(RowWriter, restarts=True)
        self._generation = [start_actor(GenerationWorker) for _ in range(generation)]
        for worker in self._generation:
            worker.load.remote()

    def generation_worker(self) -> Any:
        """A worker that is not in use, or a new one."""
        return self._generation.pop() if self._generation else start_actor(GenerationWorker)
