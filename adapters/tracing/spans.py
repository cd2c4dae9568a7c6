"""Spans that are no LLM calls: their record, the sink that takes them and calls, and the rewards among them, the
rollout's own and those that the agent emitted for its calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from groundwire.tools.errors import UserError
from groundwire.tools.files import shorten_repr
from groundwire.tools.numbers import MAX_METRIC, MAX_REWARD, NumberRangeError, reward_number

if TYPE_CHECKING:
    from groundwire.adapters.tracing.calls import LLMCall

CALL_ID = "groundwire.call_id"
"""On a call's span the id that the agent's HTTP client gave it; on an emitted span that of its call."""
REPLY_ID = "gen_ai.response.id"
"""The reply's id, as the agent got it. On an emitted span it names the reply that a reward belongs to."""
EMITTED = "groundwire.emitted"
"""On spans that an agent emitted while it ran: such a reward belongs to a call, never to the rollout."""
MEAN_SPAN_BYTES = 10 << 10
REWARD_PREFIX = "agentlightning.reward."
"""Agent Lightning's name: ``agentlightning.reward.<i>.name`` and ``.value``, the primary reward first."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimit:
    """What the spans of an attempt may be, LLM calls included. One beyond it fails the attempt."""

    spans: int = 100_000
    """Of :data:`MEAN_SPAN_BYTES` on average, at most."""
    retry: bool = False
    """Whether its rollout is then tried again."""

    def exceeded_by(self, spans: int, size: int) -> str:
        """Why an attempt must not have so many spans, of so many bytes together; empty if it may."""
        if spans > self.spans:
            return f"it has more LLM calls and emitted spans than max_spans, {self.spans:,}; the others are lost"
        if size > self.spans * MEAN_SPAN_BYTES:
            most = f"{MEAN_SPAN_BYTES >> 10} KiB times max_spans, {self.spans:,}"
            return f"its LLM calls and emitted spans are larger than {most}; the others are lost"
        return ""


def span_size(attributes: Mapping[str, Any]) -> int:
    """About how many bytes the attributes of a span take in a store."""
    return sum(len(name) + len(value if isinstance(value, str) else str(value)) for name, value in attributes.items())


class SinkRefusedError(UserError):
    """The sink refuses a request, and would refuse it again."""

    exit_code = 1


class CallSink(Protocol):
    """Stores calls and other spans. A ``ValueError`` or a :class:`SinkRefusedError` is not tried again."""

    async def sampling_of(self, rollout_id: str, attempt_id: str) -> Mapping[str, Any] | None:
        """The trainer's sampling parameters for the attempt; None unless the attempt exists and has not ended.

        They are ``temperature``, ``top_p``, ``seed`` and ``max_tokens``, each of which may be missing.
        """
        ...

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each (rollout id, attempt id), rising within an attempt."""
        ...

    async def add_calls(self, calls: Sequence[LLMCall]) -> None:
        """Store ``calls``; those that are stored already are skipped."""
        ...

    async def add_annotations(self, spans: Sequence[SpanRecord]) -> None:
        """Store other ``spans``; those that are stored already are skipped."""
        ...


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward among the spans of an attempt."""

    sequence: int
    values: dict[str, float]
    """The primary one first."""
    emitted: bool
    call_id: str
    reply_id: str

    @property
    def primary(self) -> float:
        """The value that counts."""
        return next(iter(self.values.values()))


def reward_from_spans(spans: Iterable[Any]) -> float | dict[str, float] | None:
    """The rollout's reward: the last that was not emitted by the agent. A dict (primary first) if it has components.

    A reward with components that is then returned as its primary value is one reward, and keeps its components.
    """
    rewards = [reward for reward in rewards_in(spans) if not reward.emitted]
    if not rewards:
        return None
    last = rewards[-1]
    if len(rewards) > 1 and len(last.values) == 1 and rewards[-2].primary == last.primary:
        last = rewards[-2]
    return last.values if len(last.values) > 1 else last.primary


def rewards_in(spans: Iterable[Any]) -> list[Reward]:
    """The rewards, in order, without those that :func:`read_rewards` refuses: their rollout has failed."""
    rewards = []
    for span in sorted(spans, key=lambda span: (span.sequence_id, span.start_time or 0.0)):
        attributes: Mapping[str, Any] = span.attributes or {}
        with suppress(ValueError):
            if values := read_rewards(attributes):
                call_id, reply_id = str(attributes.get(CALL_ID, "")), str(attributes.get(REPLY_ID, ""))
                rewards.append(Reward(span.sequence_id, values, bool(attributes.get(EMITTED)), call_id, reply_id))
    return rewards


def read_rewards(attributes: Mapping[str, Any]) -> dict[str, float]:
    """The named rewards in the attributes of a span, the primary one first; empty if it has none.

    Raises ``ValueError`` for a value that is no reward: text, not finite, or too large.
    """
    values: dict[str, float] = {}
    index = 0
    while (value := attributes.get(f"{REWARD_PREFIX}{index}.value")) is not None:
        name, most = str(attributes.get(f"{REWARD_PREFIX}{index}.name", index)), MAX_METRIC if index else MAX_REWARD
        try:
            values[name] = reward_number(value, most)
        except (TypeError, ValueError) as error:
            problem = error if isinstance(error, NumberRangeError) else "it must be a number"
            raise ValueError(f"a span has the reward {name!r:.60} of {shorten_repr(value)}; {problem}") from error
        index += 1
    return values
