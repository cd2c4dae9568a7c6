"""Spans that an agent emits while it runs: a reward for the call just made, or any other annotation.

``agentlightning.emit_reward(0.5)`` inside an agent becomes a span of its rollout and belongs to the newest call before
it. The store may number calls and emitted spans in another order than they happened, so the span also carries how many
calls there were. Only calls through our own HTTP client are counted; for an agent with another client the store's
numbers decide, and those are right as long as a call is numbered before its reply is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from groundwire.adapters.tracing import semconv
from groundwire.adapters.tracing.span_writer import MakeSpan, SpanWriter
from groundwire.adapters.tracing.spans import SpanRecord

__all__ = ["Emissions", "count_call", "current_emissions"]


class Emissions:
    """The emitted spans of one attempt. Belongs to the event loop of ``writer``; any thread may call :meth:`add`."""

    def __init__(self, writer: SpanWriter, *, rollout_id: str, attempt_id: str) -> None:
        self._writer, self._rollout_id, self._attempt_id = writer, rollout_id, attempt_id
        self._loop = asyncio.get_running_loop()
        self.calls = 0
        """Calls that the attempt has made so far through our own HTTP client."""

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this :func:`current_emissions` in this task and in the tasks and threads that it starts."""
        token = _emissions.set(self)
        try:
            yield
        finally:
            _emissions.reset(token)

    def add(
        self, name: str, attributes: Mapping[str, Any], *, start_time: float, end_time: float, error: str | None
    ) -> None:
        """Store a span after the calls made so far; the arguments are those of :class:`SpanRecord`."""
        after_calls = {semconv.AFTER_CALLS: self.calls} if self.calls else {}

        def make(sequence: int) -> SpanRecord:
            return SpanRecord(
                name=name,
                rollout_id=self._rollout_id,
                attempt_id=self._attempt_id,
                sequence_id=sequence,
                attributes={**attributes, semconv.EMITTED: True, **after_calls},
                start_time=start_time,
                end_time=end_time,
                error=error,
            )

        try:
            in_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            in_loop = False
        if in_loop:
            self._write(make)
        else:
            self._loop.call_soon_threadsafe(self._write, make)

    def _write(self, make: MakeSpan) -> None:
        self._writer.finish(self._writer.reserve(self._rollout_id, self._attempt_id), make)


_emissions: ContextVar[Emissions | None] = ContextVar("emissions", default=None)


def current_emissions() -> Emissions | None:
    """Those of the attempt that the calling task belongs to; None outside of an attempt."""
    return _emissions.get()


def count_call() -> None:
    """Count one LLM call of the attempt that the calling task belongs to."""
    if (emissions := _emissions.get()) is not None:
        emissions.calls += 1
