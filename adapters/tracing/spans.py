"""The record of a span that is no LLM call, and where the proxy writes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from groundwire.tools.errors import UserError

if TYPE_CHECKING:
    from groundwire.adapters.tracing.calls import LLMCall


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One span of an attempt: a reward that the agent emitted, or what another tracer wrote.

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


class SinkRefusedError(UserError):
    """The sink refuses a request, and would refuse it again."""

    exit_code = 1


class TraceSink(Protocol):
    """Stores calls and other spans. A ``ValueError`` or a :class:`SinkRefusedError` is not tried again."""

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each (rollout id, attempt id), rising within an attempt."""
        ...

    async def add_calls(self, calls: Sequence[LLMCall]) -> None:
        """Store ``calls``; those that are stored already are skipped."""
        ...

    async def add_annotations(self, spans: Sequence[SpanRecord]) -> None:
        """Store other ``spans``; those that are stored already are skipped."""
        ...


class CallSink(TraceSink, Protocol):
    """A sink that knows which attempts are open: what the proxy needs."""

    async def sampling_of(self, rollout_id: str, attempt_id: str) -> Mapping[str, Any] | None:
        """The trainer's sampling parameters for the attempt; None unless the attempt exists and has not ended.

        They are ``temperature``, ``top_p``, ``seed`` and ``max_tokens``, each of which may be missing.
        """
        ...
