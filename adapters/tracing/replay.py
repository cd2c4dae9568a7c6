"""Replays: the calls of a rollout are answered from the record of an earlier one, while its agent runs again.

A call is the one in the record with the same agent, prompt and options; of several that are equal, the next in order.
So calls that run at once may arrive in another order. Replies are sent in the order in which they ended, as an agent
may go on with the first one. Each attempt begins the record again.

A replay may end at a call: that call, and those that arrived after it, are sampled anew. Every call of a replay has its
record's id, and so none is trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.wire.apis import LocalPolicy
from groundwire.adapters.tracing.wire.exchange import HttpExchange
from groundwire.adapters.tracing.wire.request import RefusedError

_EARLIER_S = 2.0
"""How long a reply waits for calls that had ended before it: an agent that has changed may never make them."""
NOT_RECORDED = "not_in_record"
"""The code of the error that answers a call which the record does not have."""


class _Record(NamedTuple):
    rollout_id: str
    requests: list[list[LLMCall]]
    """The choices of each, by arrival."""
    start: int
    """The first request that is sampled anew."""
    answer: LLMCall | None
    """The reply to it; None to sample it."""


@dataclass(eq=False)
class RecordedRequest:
    """A request of the record and its replies; ``calls`` are its choices."""

    calls: list[LLMCall]
    replay_key: str = ""
    """The ``reply_key`` of the same request in the replay; "" until it has arrived."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def call(self) -> LLMCall:
        """The first choice."""
        return self.calls[0]

    @property
    def arrived(self) -> bool:
        """Whether the agent has asked it again."""
        return bool(self.replay_key)


@dataclass(eq=False)
class ReplayedAttempt:
    """How far an attempt has come in its record."""

    requests: list[RecordedRequest]
    sampled: list[RecordedRequest]
    """Those that are sampled anew."""
    unrecorded: list[tuple[HttpExchange, Mapping[str, Any]]] = field(default_factory=list)
    """The calls that the record does not have, with their chat requests."""

    @property
    def missing(self) -> list[RecordedRequest]:
        """What the agent has not asked again."""
        return [request for request in self.requests if not request.arrived]

    @property
    def has_left_record(self) -> bool:
        """Whether calls are sampled by now."""
        return bool(self.sampled) and self.sampled[0].arrived


class Replay:
    """Rollouts with their records. ``policy`` writes the replies of a record whose policy was in its run's process."""

    def __init__(self, policy: LocalPolicy | None = None) -> None:
        self.policy = policy
        self._records: dict[str, _Record] = {}
        self.attempts: dict[str, ReplayedAttempt] = {}
        """The last attempt of each rollout that has made a call."""
        self._attempt_ids: dict[str, str] = {}
        self._running: dict[int, RecordedRequest] = {}

    def add(
        self,
        rollout_id: str,
        recorded_id: str,
        calls: Iterable[LLMCall],
        *,
        start: LLMCall | None = None,
        answer: LLMCall | None = None,
    ) -> None:
        """Answer the calls of a rollout with those of the recorded one.

        The request of ``start`` and those that arrived later are sampled, ``start`` unless ``answer`` is its reply.
        """
        requests: dict[str, list[LLMCall]] = {}
        for call in sorted(calls, key=lambda call: call.sequence):
            requests.setdefault(call.reply_key, []).append(call)
        place = len(requests) if start is None else list(requests).index(start.reply_key)
        self._records[rollout_id] = _Record(recorded_id, list(requests.values()), place, answer)

    def forget(self, rollout_id: str) -> None:
        """Drop a rollout that has ended."""
        for known in (self._records, self.attempts, self._attempt_ids):
            known.pop(rollout_id, None)

    async def find(self, exchange: HttpExchange) -> None:
        """Give an exchange its recorded calls, when they are due.

        Raises :class:`RefusedError` for one that the record does not have.
        """
        if exchange.rollout_id not in self._records:
            return
        record = self._records[exchange.rollout_id]
        exchange.replayed = record.rollout_id
        if self._attempt_ids.get(exchange.rollout_id) != exchange.attempt_id:
            self._attempt_ids[exchange.rollout_id] = exchange.attempt_id
            requests = [RecordedRequest(choices) for choices in record.requests]
            self.attempts[exchange.rollout_id] = ReplayedAttempt(requests, requests[record.start :])
        attempt = self.attempts[exchange.rollout_id]
        request = next((request for request in attempt.missing if _is_same(request.call, exchange)), None)
        if request is None and not attempt.has_left_record:
            attempt.unrecorded.append((exchange, exchange.request))
            raise RefusedError(
                400, f"the record of rollout {exchange.replayed} does not have this call", code=NOT_RECORDED
            )
        if request is None:
            return
        request.replay_key = exchange.reply_key
        if request in attempt.sampled:
            exchange.recorded = [record.answer] if request is attempt.sampled[0] and record.answer else ()
            return
        exchange.recorded = request.calls
        self._running[id(exchange)] = request
        earlier = [
            other.answered.wait()
            for other in attempt.requests
            if not (other in attempt.sampled or other.answered.is_set())
            and request.call.started < other.call.ended < request.call.ended
        ]
        if earlier:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*earlier), _EARLIER_S)

    def ended(self, exchange: HttpExchange) -> None:
        """The agent has the reply of an exchange."""
        if (request := self._running.pop(id(exchange), None)) is not None:
            request.answered.set()


def _is_same(call: LLMCall, exchange: HttpExchange) -> bool:
    return call.agent == exchange.agent and call.prompt_key == exchange.prompt_key
