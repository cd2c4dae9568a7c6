"""What an agent says while it works: a reward for a call just made, or any other annotation.

``agentlightning.emit_reward(0.5)`` inside an agent becomes a span of its rollout and belongs to the newest call before
it. Which one that is, is known here and not in the store, which may number calls and rewards in another order than they
happened: so the span says how many calls there were. Calls through a client of the agent's own are not seen here; then
the store's numbers decide, and those are right as long as it numbers a call before its reply is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from groundwire.adapters.tracing import semconv as names
from groundwire.adapters.tracing.span_writer import SpanWriter

if TYPE_CHECKING:
    from agentlightning.types import Span, SpanCoreFields

__all__ = ["Emissions", "count_call", "current_emissions"]


class Emissions:
    """What one attempt emits. Lives on the event loop of ``writer``; :meth:`add` may be called from any thread."""

    def __init__(self, writer: SpanWriter, *, rollout_id: str, attempt_id: str) -> None:
        self._writer, self._rollout_id, self._attempt_id = writer, rollout_id, attempt_id
        self._loop = asyncio.get_running_loop()
        self.calls = 0
        """How many calls the attempt has made so far through a client of ours."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take what is emitted inside, in this task and in those that it starts."""
        token = _emissions.set(self)
        try:
            yield
        finally:
            _emissions.reset(token)

    def add(self, fields: SpanCoreFields) -> None:
        """Put a span among the calls of the attempt."""
        marks = {names.EMITTED: True, **({names.AFTER_CALLS: self.calls} if self.calls else {})}
        fields = fields.model_copy(update={"attributes": {**fields.attributes, **marks}})
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._add(fields)
        else:
            self._loop.call_soon_threadsafe(self._add, fields)

    def _add(self, fields: SpanCoreFields) -> None:
        from agentlightning.types import Span

        def span(sequence: int) -> Span:
            return Span.from_core_fields(
                fields, rollout_id=self._rollout_id, attempt_id=self._attempt_id, sequence_id=sequence
            )

        self._writer.add(self._rollout_id, self._attempt_id, span)


_emissions: ContextVar[Emissions | None] = ContextVar("emissions", default=None)


def current_emissions() -> Emissions | None:
    """Those of the attempt that the caller works for; None outside of one."""
    return _emissions.get()


def count_call() -> None:
    """Count one LLM call of the attempt that the caller works for."""
    if (emissions := _emissions.get()) is not None:
        emissions.calls += 1
