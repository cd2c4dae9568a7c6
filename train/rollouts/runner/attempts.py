"""The attempts that run in this process, and the writer of what their agents emit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from groundwire.adapters.tracing.call_writer import CallsNotStoredError, CallWriter
from groundwire.adapters.tracing.emitted_spans import Emissions
from groundwire.adapters.tracing.spans import TraceSink
from groundwire.train.store.rollout import Rollout

__all__ = ["PoolStoppedError", "RunningAttempts"]

_CLOSE_S = 5.0
_FLUSH_S = 120.0


class PoolStoppedError(Exception):
    """The runner pool stops; another runner gets the rollout."""


class RunningAttempts:
    """The attempts that run on one event loop, and the writer of the spans that their agents emit."""

    def __init__(self, store: TraceSink) -> None:
        self._store, self._stopping = store, False
        self._writer: CallWriter | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def open(self, rollout: Rollout) -> AsyncIterator[None]:
        """Encloses the run of an agent. Raises :class:`CallsNotStoredError` if the store refuses an emitted span, and
        :class:`PoolStoppedError` when :meth:`interrupt` is called.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._stopping:
                raise PoolStoppedError
            writer = self._writer = self._writer or CallWriter(self._store)
            attempt_id = rollout.attempts[-1].attempt_id
            emissions = Emissions(writer, rollout_id=rollout.rollout_id, attempt_id=attempt_id)
            try:
                with emissions.activate():
                    yield
            except Exception:
                await writer.flush(rollout.rollout_id, timeout_s=_FLUSH_S)
                raise
            await writer.flush(rollout.rollout_id, timeout_s=_FLUSH_S)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            raise PoolStoppedError from None
        finally:
            self._tasks.discard(task)

    def interrupt(self) -> None:
        """Interrupt the agents that are running, and refuse further ones."""
        self._stopping = True
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Write the spans that are left."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with suppress(CallsNotStoredError):  # of attempts that another runner repeats
                await writer.close(timeout_s=_CLOSE_S)
