"""Agent Lightning's tracer interface for many rollouts at once.

Agent Lightning's own OpenTelemetry tracer holds one active trace per process and blocks while it exports. This one
serves any number of rollouts. The proxy traces the LLM calls; this tracer knows which agents are running, and stores
the spans that they emit (``agentlightning.emit_reward``). The rollout is known from the context of the calling task.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from agentlightning.tracer.base import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.types import Attributes, Span, SpanCoreFields, TraceStatus
from pydantic_core import to_json

from groundwire.adapters.tracing.emitted_spans import Emissions, current_emissions
from groundwire.adapters.tracing.span_writer import SpansNotStoredError, SpanWriter
from groundwire.train.store.limits import check_request
from groundwire.train.store.spans import LightningSpanSink

__all__ = ["RolloutTracer"]

_CLOSE_S = 5.0
_FLUSH_S = 120.0
_RESERVED = "groundwire."
_open_tracers: list[RolloutTracer] = []
_open_tracers_lock = threading.Lock()


class _PoolStoppedError(Exception):
    """The runner pool stops; another runner gets the rollout."""


class RolloutTracer(Tracer):
    """The tracer of all runners of one event loop.

    ``tasks`` are the tasks whose agent is running. Cancelling one fails its attempt, so that the store gives the
    rollout to another runner. (A task that is cancelled outside of the agent is a success to Agent Lightning's runner.)
    """

    def __init__(self, stopping: asyncio.Event) -> None:
        super().__init__()
        self._stopping = stopping
        self._writer: SpanWriter | None = None
        self.tasks: set[asyncio.Task[Any]] = set()

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Store a span that an agent emits, after the calls that its attempt has made so far.

        Raises ``ValueError``, in the agent, if the store would refuse it.
        """
        emissions = current_emissions()
        if emissions is None:
            raise RuntimeError(f"{name} was emitted outside of a rollout: emit it in the agent, or in what it calls")
        span = DummyTracer().create_span(name, attributes, timestamp, status)
        _check(span)
        emissions.add(
            span.name,
            span.attributes,
            start_time=span.start_time or 0.0,
            end_time=span.end_time or 0.0,
            error=(span.status.description or "") if span.status.status_code == "ERROR" else None,
        )
        return span

    @asynccontextmanager
    async def trace_context(
        self, name: str | None = None, *, rollout_id: str | None = None, attempt_id: str | None = None
    ) -> AsyncIterator[None]:
        """Encloses one attempt. Raises :class:`SpansNotStoredError` if the store refuses an emitted span."""
        assert rollout_id is not None
        assert attempt_id is not None
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            if self._stopping.is_set():
                raise _PoolStoppedError
            self._open()
            writer = self._writer
            if writer is None:
                assert self._store is not None
                writer = self._writer = SpanWriter(LightningSpanSink(self._store))
            emissions = Emissions(writer, rollout_id=rollout_id, attempt_id=attempt_id)
            try:
                with emissions.activate():
                    yield
            except Exception:
                await writer.flush(rollout_id, timeout_s=_FLUSH_S)
                raise
            await writer.flush(rollout_id, timeout_s=_FLUSH_S)
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            raise _PoolStoppedError from None
        finally:
            self.tasks.discard(task)

    async def close(self) -> None:
        """Write the spans that are left."""
        with _open_tracers_lock:
            if self in _open_tracers:
                _open_tracers.remove(self)
            if get_active_tracer() is self:
                clear_active_tracer()
                if _open_tracers:
                    set_active_tracer(_open_tracers[0])
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with suppress(SpansNotStoredError):  # of attempts that another runner repeats
                await writer.close(timeout_s=_CLOSE_S)

    def _open(self) -> None:
        """Make a tracer active for the emitters. One per process is enough: any of ours finds the attempt."""
        with _open_tracers_lock:
            if self not in _open_tracers:
                _open_tracers.append(self)
            if get_active_tracer() is None:
                set_active_tracer(self)

    def get_last_trace(self) -> list[Span]:
        """Always empty: the spans are in the store."""
        return []


def _check(span: SpanCoreFields) -> None:
    for name in (span.name, *(span.attributes or {})):
        if name.startswith(_RESERVED):
            raise ValueError(f"{name!r:.60} cannot be emitted: names that begin with {_RESERVED!r} are reserved")
    try:
        check_request({}, span)
        to_json(span.attributes)
    except ValueError as error:
        raise ValueError(f"{span.name!r:.60} cannot be emitted: {error}") from error
