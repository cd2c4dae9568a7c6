"""Writes the spans of :mod:`groundwire.adapters.tracing` to a Lightning store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentlightning.store.base import LightningStore
from agentlightning.types import Span, TraceStatus

from groundwire.adapters.tracing.spans import SpanRecord, SpansRefusedError

__all__ = ["LightningSpanSink", "lightning_span"]


class LightningSpanSink:
    """A :class:`groundwire.adapters.tracing.spans.SpanSink` in front of ``store``."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each (rollout id, attempt id), rising within an attempt."""
        with _refusals():
            return await self._store.get_many_span_sequence_ids(attempts)

    async def add_spans(self, spans: Sequence[SpanRecord]) -> None:
        """Store ``spans``; those that are stored already are skipped."""
        with _refusals():
            await self._store.add_many_spans([lightning_span(span) for span in spans])


def lightning_span(span: SpanRecord) -> Span:
    """``span`` as Agent Lightning stores it."""
    return Span.from_attributes(
        name=span.name,
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        sequence_id=span.sequence_id,
        span_id=span.span_id,
        attributes=dict(span.attributes),
        start_time=span.start_time,
        end_time=span.end_time,
        status=None if span.error is None else TraceStatus(status_code="ERROR", description=span.error),
    )


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        # Agent Lightning raises a plain ValueError for an unknown rollout or attempt.
        raise SpansRefusedError(str(error)) from error
