"""The interface of a store of rollouts: in memory, in a SQLite file, or behind HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.train.store.rollout import Outcome, Rollout

__all__ = ["RolloutStore"]


class RolloutStore(Protocol):
    """A queue of rollouts, and what is known of each.

    Methods raise ``ValueError`` for an unknown rollout or attempt. A change that comes too late, of an ended attempt or
    rollout, is ignored; late calls are stored.
    """

    on_attempt_end: Callable[[str], None] | None
    """Called with the rollout's id when a runner ends an attempt; only a store of the same process calls it."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts to the queue."""
        ...

    async def dequeue(self, limit: int, worker_id: str | None = None) -> Sequence[Rollout]:
        """Take up to ``limit`` rollouts, each with a new attempt as its last."""
        ...

    async def get(self, rollout_id: str, *, with_calls: bool = True) -> Rollout | None:
        """A rollout with its last attempt's outcome, calls and annotations; None if the store does not have it."""
        ...

    async def ended(self, rollout_ids: Collection[str]) -> Sequence[str]:
        """Which of these have ended, after attempts that are overdue were given up."""
        ...

    async def unfinished(self, resources_id: str) -> Sequence[str]:
        """The rollouts of a run that have not ended."""
        ...

    async def cancel(self, rollout_id: str) -> None:
        """End a rollout that nobody waits for any more."""
        ...

    async def heartbeat(self, rollout_id: str, attempt_id: str, at: float) -> bool:
        """Note a sign of life at ``at``, by the store's clock. False if the attempt is not the rollout's open one."""
        ...

    async def end_attempt(self, rollout_id: str, attempt_id: str, outcome: Outcome | None, *, failed: bool) -> None:
        """End an attempt. A failed one is tried again while ``max_attempts`` allow it."""
        ...

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each (rollout id, attempt id), rising within an attempt."""
        ...

    async def add_calls(self, calls: Sequence[LLMCall]) -> None:
        """Store calls; those that are stored already are skipped."""
        ...

    async def add_annotations(self, spans: Sequence[SpanRecord]) -> None:
        """Store other spans of attempts; those that are stored already are skipped."""
        ...

    async def forget(self, rollout_id: str) -> None:
        """Free the memory of a rollout that has been read. A store in a file keeps it."""
        ...
