"""Spans that are no LLM calls: their record, the sink that takes them and calls, and the rewards among them, the
rollout's own and those that the agent emitted for its calls.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from groundwire.adapters.tracing.semconv import CALL_ID, EMITTED, RESPONSE_ID, REWARD_PREFIX
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


def reward_from_spans(spans: Iterable[Any]) -> float | dict[str, float] | None:
    """The rollout's reward: the last that was not emitted by the agent. A dict (primary first) if it has components.

    A reward with components that is then returned as its primary value is one reward, and keeps its components.
    """
    rewards = [reward.values for reward in _rewards(spans) if not reward.emitted]
    if not rewards:
        return None
    last = rewards[-1]
    if len(rewards) > 1 and len(last) == 1 and _primary(rewards[-2]) == _primary(last):
        last = rewards[-2]
    return last if len(last) > 1 else _primary(last)


def call_rewards(
    sequences: Sequence[int], spans: Iterable[Any], *, ids: Mapping[str, int] | None = None
) -> dict[int, float]:
    """The emitted reward of each call that has one, by the call's index in ``sequences``, the sorted calls' numbers.

    An emitted reward belongs to the reply that it names, else to the call in whose context it was emitted, else to the
    newest call before it; of several the last counts. ``ids`` are the indices of calls by the ids of calls and replies.
    Without marks of emitted spans the last reward is the rollout's, and so is an equal one after the last call.
    """
    ids = ids or {}
    rewards = _rewards(spans)
    returned = next((reward for reward in reversed(rewards) if not reward.emitted), None)
    by_call: dict[int, float] = {}
    for reward in rewards:
        index = ids.get(reward.call_id, bisect_left(sequences, reward.sequence) - 1)
        if reward.reply_id:
            index = ids.get(reward.reply_id, -1)  # a reply of another model is no call
        value = _primary(reward.values)
        repeated = returned is not None and index == len(sequences) - 1 and value == _primary(returned.values)
        if index >= 0 and (reward.emitted or not (reward is returned or repeated)):
            by_call[index] = value
    return by_call


@dataclass(frozen=True, slots=True)
class _Reward:
    sequence: int
    values: dict[str, float]
    emitted: bool
    call_id: str
    reply_id: str


def _rewards(spans: Iterable[Any]) -> list[_Reward]:
    """The finite rewards, in order."""
    rewards = []
    for span in spans:
        values: dict[str, float] = {}
        attributes: Mapping[str, Any] = span.attributes or {}
        index = 0
        while (value := attributes.get(f"{REWARD_PREFIX}{index}.value")) is not None:
            values[str(attributes.get(f"{REWARD_PREFIX}{index}.name", index))] = float(value)
            index += 1
        if values and all(map(math.isfinite, values.values())):
            call_id, reply_id = str(attributes.get(CALL_ID, "")), str(attributes.get(RESPONSE_ID, ""))
            reward = _Reward(span.sequence_id, values, bool(attributes.get(EMITTED)), call_id, reply_id)
            rewards.append((span.sequence_id, span.start_time or 0.0, reward))
    return [reward for *_, reward in sorted(rewards, key=lambda entry: entry[:2])]


def _primary(values: dict[str, float]) -> float:
    return next(iter(values.values()))
