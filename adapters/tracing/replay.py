"""Replays: the calls of a rollout are answered from the record of an earlier one, while its agent runs again.

A call is the one in the record with the same agent, prompt and options, in whatever order calls arrive. Of several that
are equal and run at once, it is the one that the agent made in the same place (:func:`place_of`). No call is answered
before those that ran at once with it have arrived, and those that ended before it are answered: an agent may go on
with the first one. Each attempt begins the record again.

A replay may end at a call: that call, and those that arrived after it, are sampled anew. Every call of a replay has its
record's id, and so none is trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.emitted_spans import place_of
from groundwire.adapters.tracing.wire.apis import LocalPolicy
from groundwire.adapters.tracing.wire.exchange import CLIENT_GONE, HttpExchange
from groundwire.adapters.tracing.wire.request import RefusedError

_PATIENCE_S = 5.0
"""How long a reply waits for what came before it in the record: an agent that has changed may never ask it."""
_APART_S = 0.002  # between replies whose order counts: the first one must have left
NOT_RECORDED = "not_in_record"
"""The code of the error that answers a call which the record does not have."""


class _Record(NamedTuple):
    rollout_id: str
    requests: list[list[LLMCall]]
    """The choices of each, by arrival."""
    start: int
    """The first request that is sampled anew."""
    answers: Sequence[LLMCall]
    """The choices of the reply to it; none to sample it."""
    is_cut: bool


@dataclass(eq=False)
class RecordedRequest:
    """A request of the record and its replies; ``calls`` are its choices."""

    calls: list[LLMCall]
    replay_key: str = ""
    """The ``reply_key`` of the same request in the replay; "" until it has arrived."""
    answered: bool = False
    late: bool = False
    """Whether others have waited for it in vain."""

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

    attempt_id: str
    requests: list[RecordedRequest]
    sampled: list[RecordedRequest]
    """Those that are sampled anew."""
    unrecorded: list[tuple[HttpExchange, Mapping[str, Any]]] = field(default_factory=list)
    """The calls that the record does not have, with their chat requests."""
    waiting: dict[int, tuple[HttpExchange, RecordedRequest]] = field(default_factory=dict)
    """The calls that have no answer yet, by identity."""
    _change: asyncio.Future[None] = field(default_factory=asyncio.Future)  # the next change, for calls that wait

    @property
    def missing(self) -> list[RecordedRequest]:
        """What the agent has not asked again."""
        return [request for request in self.requests if not request.arrived]

    @property
    def has_left_record(self) -> bool:
        """Whether calls are sampled by now."""
        return bool(self.sampled) and self.sampled[0].arrived

    def arrive(self, exchange: HttpExchange, request: RecordedRequest) -> None:
        """A call has arrived, to ``request`` or to an equal one that waits: places decide."""
        self.waiting[id(exchange)] = exchange, request
        equal = [pair for pair in self.waiting.values() if _is_same(request.call, pair[0])]
        requests = sorted((known for _, known in equal), key=lambda known: place_of(known.call.call_id))
        for new in sorted((known for known, _ in equal), key=lambda known: place_of(known.call_id)):
            old = requests.pop(0)
            old.replay_key, self.waiting[id(new)] = new.reply_key, (new, old)
        self.wake()

    async def turn(self, exchange: HttpExchange) -> RecordedRequest:
        """The request of a call, when its answer is due."""
        while before := self._before(self.waiting[id(exchange)][1]):
            done, _ = await asyncio.wait({self._change}, timeout=_PATIENCE_S)  # wait_for may swallow a cancellation
            if done:
                await asyncio.sleep(_APART_S)
                continue
            for request in before:
                request.late = True
            self.wake()
        return self.waiting[id(exchange)][1]

    def _before(self, request: RecordedRequest) -> list[RecordedRequest]:
        """What must arrive or be answered before ``request`` is; nothing once the agent goes another way.

        What is sampled waits for nothing but equal calls, among which places decide.
        """
        call, before = request.call, []
        for other in self.requests if not self.unrecorded else ():
            if other is request or other.answered or other.late:
                continue
            both_recorded = not {id(request), id(other)} & {*map(id, self.sampled)}
            if not other.arrived and (both_recorded or other.call.prompt_key == call.prompt_key):
                is_before = other.call.started < call.ended and call.started < other.call.ended
            else:
                is_before = both_recorded and call.started < other.call.ended < call.ended
            before += [other] * is_before
        return before

    def wake(self) -> None:
        """Let all calls that wait look again."""
        self._change.set_result(None)
        self._change = asyncio.Future()

    def end(self, exchange: HttpExchange) -> None:
        """The agent has the reply of a call."""
        if (pair := self.waiting.pop(id(exchange), None)) is not None:
            pair[1].answered = True
            self.wake()


class Replay:
    """Rollouts with their records. ``policy`` writes the replies of a record whose policy was in its run's process."""

    def __init__(self, policy: LocalPolicy | None = None) -> None:
        self.policy = policy
        self._records: dict[str, _Record] = {}
        self.attempts: dict[str, ReplayedAttempt] = {}
        """The last attempt of each rollout that has made a call."""

    def add(
        self,
        rollout_id: str,
        recorded_id: str,
        calls: Iterable[LLMCall],
        *,
        start: LLMCall | None = None,
        answers: Sequence[LLMCall] = (),
        is_cut: bool = False,
    ) -> None:
        """Answer the calls of a rollout with those of the recorded one.

        The request of ``start`` and those that arrived later are sampled, ``start`` unless ``answers`` are its reply.
        ``is_cut``: the recorded one was stopped, and with it what had no reply yet.
        """
        requests: dict[str, list[LLMCall]] = {}
        for call in sorted(calls, key=lambda call: call.sequence):
            requests.setdefault(call.reply_key, []).append(call)
        place = len(requests) if start is None else list(requests).index(start.reply_key)
        self._records[rollout_id] = _Record(recorded_id, list(requests.values()), place, answers, is_cut)

    def forget(self, rollout_id: str) -> None:
        """Drop a rollout that has ended."""
        self._records.pop(rollout_id, None)
        self.attempts.pop(rollout_id, None)

    async def find(self, exchange: HttpExchange) -> None:
        """Give an exchange its recorded calls, when they are due.

        Raises :class:`RefusedError` for one that the record does not have.
        """
        if exchange.rollout_id not in self._records:
            return
        record = self._records[exchange.rollout_id]
        exchange.replayed = record.rollout_id
        attempt = self.attempts.get(exchange.rollout_id)
        if attempt is None or attempt.attempt_id != exchange.attempt_id:
            requests = [RecordedRequest(choices) for choices in record.requests]
            attempt = ReplayedAttempt(exchange.attempt_id, requests, requests[record.start :])
            self.attempts[exchange.rollout_id] = attempt
        request = next((request for request in attempt.missing if _is_same(request.call, exchange)), None)
        if request is None and not attempt.has_left_record:
            attempt.unrecorded.append((exchange, exchange.request))
            attempt.wake()
            raise RefusedError(
                400, f"the record of rollout {exchange.replayed} does not have this call", code=NOT_RECORDED
            )
        if request is None:
            return
        attempt.arrive(exchange, request)
        request = await attempt.turn(exchange)
        exchange.recorded = request.calls
        if record.is_cut and request.call.status == CLIENT_GONE:
            raise RefusedError(400, f"the record of rollout {exchange.replayed} ends here", code=NOT_RECORDED)
        if request in attempt.sampled:
            exchange.recorded = record.answers if request is attempt.sampled[0] else ()

    def ended(self, exchange: HttpExchange) -> None:
        """The agent has the reply of an exchange."""
        if (attempt := self.attempts.get(exchange.rollout_id)) is not None:
            attempt.end(exchange)


def _is_same(call: LLMCall, exchange: HttpExchange) -> bool:
    return call.agent == exchange.agent and call.prompt_key == exchange.prompt_key
