"""Agent Lightning's tracer interface for many rollouts at once.

Its own OpenTelemetry tracer holds one active trace per process and exports while everybody waits. This one may be
entered by any number of rollouts: an agent's calls are recorded for its own attempt (:mod:`adapters.tracing.recorder`)
and written behind its back, and an attempt ends once its calls are in the store, so that nobody reads half of them.
Where a proxy traces the calls it has only to know which agents are at work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from agentlightning.tracer.base import Tracer
from agentlightning.types import AttemptedRollout, Span

from adapters.tracing.recorder import Recorder
from adapters.tracing.writer import SpansNotStoredError, SpanWriter

__all__ = ["RolloutTracer"]

_CLOSE_S = 5.0


class _StoppedError(Exception):
    """The pool stops; the rollout is for another runner."""


class RolloutTracer(Tracer):
    """The tracer of all runners of one event loop.

    ``tasks`` are those whose agent is at work: they may be cancelled, and their attempt then fails, so that the store
    gives the rollout to another runner. (Cancelled anywhere else, agentlightning's runner reports a success.)
    """

    def __init__(self, stopping: asyncio.Event) -> None:
        super().__init__()
        self._stopping = stopping
        self._writer: SpanWriter | None = None
        self.tasks: set[asyncio.Task[Any]] = set()

    def recorder(self, rollout: AttemptedRollout, *, model: str) -> Recorder:
        """What records the calls of an attempt whose agent talks to the policy itself."""
        if self._writer is None:
            assert self._store is not None
            self._writer = SpanWriter(self._store)
        return Recorder(self._writer, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, model=model)

    def trace_context(
        self, name: str | None = None, *, rollout_id: str | None = None, **_: Any
    ) -> AbstractAsyncContextManager[Any]:
        """Around one attempt. Raises :class:`SpansNotStoredError` where the store refuses one of its calls."""
        return self._at_work(rollout_id)

    @asynccontextmanager
    async def _at_work(self, rollout_id: str | None) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            if self._stopping.is_set():
                raise _StoppedError
            try:
                yield
            except Exception:
                await self._flush(rollout_id)
                raise
            await self._flush(rollout_id)
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            raise _StoppedError from None
        finally:
            self.tasks.discard(task)

    async def _flush(self, rollout_id: str | None) -> None:
        if self._writer is not None:
            await self._writer.flush(rollout_id)

    async def close(self) -> None:
        """Write what is left and end."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with suppress(SpansNotStoredError):  # of attempts that were given back: another makes its own calls
                await writer.close(timeout_s=_CLOSE_S)

    def get_last_trace(self) -> list[Span]:
        """Nothing: the spans are in the store."""
        return []
