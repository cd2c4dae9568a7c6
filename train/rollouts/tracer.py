"""Agent Lightning's tracer interface for many rollouts at once.

Its own OpenTelemetry tracer holds one active trace per process and exports while everybody waits. This one may be
entered by any number of rollouts. The proxy traces the LLM calls; this tracer knows which agents are running and stores
what they emit (``agentlightning.emit_reward``). The context of the calling task says which rollout that belongs to.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any

from agentlightning.tracer.base import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.types import Attributes, Span, SpanCoreFields, TraceStatus

from groundwire.adapters.tracing.emitted_spans import Emissions, current_emissions
from groundwire.adapters.tracing.span_writer import SpansNotStoredError, SpanWriter

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

    def trace_context(
        self, name: str | None = None, *, rollout_id: str | None = None, attempt_id: str | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """Around one attempt. Raises :class:`SpansNotStoredError` where the store refuses one of its calls."""
        return self._at_work(rollout_id or "", attempt_id or "")

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """What an agent emits: it is put among the calls of the attempt that it works for."""
        emissions = current_emissions()
        if emissions is None:
            raise RuntimeError(f"{name} was emitted outside of a rollout: emit it in the agent, or in what it calls")
        fields = DummyTracer().create_span(name, attributes, timestamp, status)
        emissions.add(fields)
        return fields

    def _writing(self) -> SpanWriter:
        if self._writer is None:
            assert self._store is not None
            self._writer = SpanWriter(self._store)
        return self._writer

    @asynccontextmanager
    async def _at_work(self, rollout_id: str, attempt_id: str) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            if self._stopping.is_set():
                raise _StoppedError
            emissions = Emissions(self._writing(), rollout_id=rollout_id, attempt_id=attempt_id)
            try:
                with _active(self), emissions.listening():
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

    async def _flush(self, rollout_id: str) -> None:
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


_at_work_lock = threading.Lock()
_at_work_count = 0


@contextmanager
def _active(tracer: Tracer) -> Iterator[None]:
    """Make it the one that emitters find, as long as any agent is at work in this process; another's stays.

    Whose it is does not matter: all of them find the attempt by the context.
    """
    global _at_work_count  # noqa: PLW0603 (Agent Lightning's own is one for the process, too)
    with _at_work_lock:
        _at_work_count += 1
        if get_active_tracer() is None:
            set_active_tracer(tracer)
    try:
        yield
    finally:
        with _at_work_lock:
            _at_work_count -= 1
            if not _at_work_count and isinstance(get_active_tracer(), RolloutTracer):
                clear_active_tracer()
