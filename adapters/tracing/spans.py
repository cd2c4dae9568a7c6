"""The record of a span, and the interface of a store for such records."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["SpanRecord", "SpanSink", "SpansRefusedError"]


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


class SpanSink(Protocol):
    """Stores spans. The last two methods raise :class:`SpansRefusedError` if a retry cannot help."""

    async def sampling_of(self, rollout_id: str, attempt_id: str) -> Mapping[str, Any] | None:
        """The trainer's sampling parameters for the attempt; None unless the attempt exists and has not ended.

        They are ``temperature``, ``top_p``, ``seed`` and ``max_tokens``, each of which may be missing.
        """
        ...

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each (rollout id, attempt id), rising within an attempt."""
        ...

    async def add_spans(self, spans: Sequence[SpanRecord]) -> None:
        """Store ``spans``; those that are stored already are skipped."""
        ...


class SpansRefusedError(Exception):
    """The sink does not know the rollout or the attempt."""
