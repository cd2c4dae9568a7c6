"""The record of a span, and the interface of a store for such records."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["SpanRecord", "SpanSink", "SpanStore", "SpansRefusedError", "span_parts"]

_MAX_PART = 4 << 20
"""Characters of text in one request to a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One span of an attempt.

    Whatever reads spans also takes Agent Lightning's ``Span``, whose fields have the same names.
    """

    name: str
    rollout_id: str
    attempt_id: str
    sequence_id: int
    """Its place among the spans of the attempt."""
    attributes: Mapping[str, Any]
    start_time: float
    """Seconds since the epoch, as ``end_time``."""
    end_time: float
    error: str | None = None
    """The message of a failure; None on success."""
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Eight bytes in hexadecimal: a span that is written twice is stored once."""
    parent_id: str | None = None
    """The span of the same trace that encloses it, where a tracer says so."""


class SpanStore(Protocol):
    """Stores spans. Its methods raise :class:`SpansRefusedError` if a retry cannot help."""

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each (rollout id, attempt id), rising within an attempt."""
        ...

    async def add_spans(self, spans: Sequence[SpanRecord]) -> None:
        """Store ``spans``; those that are stored already are skipped."""
        ...


class SpanSink(SpanStore, Protocol):
    """A store of spans that knows which attempts are open: what the proxy needs."""

    async def sampling_of(self, rollout_id: str, attempt_id: str) -> Mapping[str, Any] | None:
        """The trainer's sampling parameters for the attempt; None unless the attempt exists and has not ended.

        They are ``temperature``, ``top_p``, ``seed`` and ``max_tokens``, each of which may be missing.
        """
        ...


def span_parts(spans: Sequence[SpanRecord]) -> Iterator[list[SpanRecord]]:
    """``spans`` in parts of a size that a store accepts in one request."""
    part: list[SpanRecord] = []
    size = 0
    for span in spans:
        length = sum(len(value) for value in span.attributes.values() if isinstance(value, str))
        if part and size + length > _MAX_PART:
            yield part
            part, size = [], 0
        part.append(span)
        size += length
    yield part


class SpansRefusedError(Exception):
    """The sink does not know the rollout or the attempt."""
