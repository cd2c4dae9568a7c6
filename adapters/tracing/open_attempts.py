"""Which attempts may call the policy, those that the store has given to a runner and that have not ended, and how
their replies are sampled.

A runner that asks why its agent failed gets a :class:`CallSummary` of the calls of a running attempt, from
``POST {base URL}/calls`` with ``{"names": [...]}``.

An attempt's address is made of its two ids, 80 random bits, which only the store lists. So an agent knows the address
of its own attempt and cannot guess another's.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.wire.exchange import HttpExchange, read_exchange
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.tools.text import texts_in

_FRESH_S = 1.0
"""How long an answer of the store holds."""
_FIRST_LOOKUP_S, _LOOKUP_S = 10.0, 1.0
"""How long a call waits for the store: the first of an attempt, and later ones, which go on without an answer."""
_MAX_KNOWN = 10_000
_Attempt = tuple[str, str]
CALLS_PATH = "calls"
_REQUEST_REFUSED = (400, 413, 422)
"""The statuses of a request that is too long or wrong."""
_MAX_KEPT = 100
_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class CallSummary:
    """The calls of an attempt so far."""

    calls: int
    running_s: float
    """How long the call that waits for its reply has been waiting; 0 if none does."""
    idle_s: float
    """How long no call has been waiting."""
    failure: str
    """How the last call failed, if that was no fault of its request."""
    at_limit: bool
    """Whether a call was refused because the attempt had made ``max_calls``."""
    made_up: list[str]
    """The names that are in the policy's replies and in nothing that it was given."""


@dataclass
class CallLog:
    """The calls of an attempt that runs, the last ones with their texts."""

    count: int = 0
    at_limit: bool = False
    _kept: deque[HttpExchange] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT))

    def add(self, exchange: HttpExchange) -> None:
        """Add a call that begins."""
        self.count += 1
        self._kept.append(exchange)

    def summary(self, names: Collection[str]) -> CallSummary:
        """The summary; ``names`` may be made up."""
        now = time.time()
        running, ended = ([call for call in self._kept if bool(call.ended) == done] for done in (False, True))
        last = max(ended, key=lambda exchange: exchange.ended, default=None)
        return CallSummary(
            calls=self.count,
            running_s=now - min((call.started for call in running), default=now),
            idle_s=0.0 if running or last is None else now - last.ended,
            failure="" if last is None else _failure(read_exchange(last, 0, 0)),
            at_limit=self.at_limit,
            made_up=_made_up(names, [read_exchange(call, 0, 0) for call in ended if names]),
        )


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that may call the policy."""

    attempt_id: str
    confirmed: float = 0.0
    """When the store answered, in monotonic seconds."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's sampling parameters for the attempt."""
    requests: Counter[int] = field(default_factory=Counter)
    calls: CallLog = field(default_factory=CallLog)

    def count_request(self, prompt: str) -> int:
        """The number of requests with the same prompt before this one."""
        key = hash(prompt)
        self.requests[key] += 1
        return self.requests[key] - 1


class OpenAttempts:
    """Asks ``sampling_of(rollout_id, attempt_id)``, at most once a second for each attempt, on one event loop.

    The argument is a method of a :class:`groundwire.adapters.tracing.spans.CallSink`.
    """

    def __init__(self, sampling_of: Callable[[str, str], Awaitable[Mapping[str, Any] | None]]) -> None:
        self._sampling_of = sampling_of
        self._known: dict[str, OpenAttempt] = {}  # by rollout, which has one open attempt
        self._lookups: dict[_Attempt, asyncio.Task[None]] = {}

    async def check(self, rollout_id: str, attempt_id: str) -> OpenAttempt:
        """The attempt. Raises :class:`RefusedError` if it is not open (410), or the store does not answer (503)."""
        attempt = rollout_id, attempt_id
        known = self._find(attempt)
        if known is not None and time.monotonic() - known.confirmed < _FRESH_S:
            return known
        lookup = self._lookups.get(attempt)
        if lookup is None:
            lookup = self._lookups[attempt] = asyncio.create_task(self._look_up(attempt))
        await asyncio.wait([lookup], timeout=_FIRST_LOOKUP_S if known is None else _LOOKUP_S)
        error = lookup.exception() if lookup.done() and not lookup.cancelled() else None
        if (known := self._find(attempt)) is not None:
            return known
        if not lookup.done() or error is not None:
            raise RefusedError(503, f"the store does not say whether the attempt is running: {error or 'no answer'}")
        raise RefusedError(
            410,
            f"attempt {attempt_id!r:.60} of rollout {rollout_id!r:.60} is unknown or has ended: nothing is sampled for "
            "it; use the base URL that the agent was given",
        )

    def forget(self, rollout_id: str) -> None:
        """Ask the store before the next call of the rollout."""
        self._known.pop(rollout_id, None)

    def close(self) -> None:
        """End the lookups."""
        for lookup in self._lookups.values():
            lookup.cancel()

    def _find(self, attempt: _Attempt) -> OpenAttempt | None:
        known = self._known.get(attempt[0])
        return known if known is not None and known.attempt_id == attempt[1] else None

    async def _look_up(self, attempt: _Attempt) -> None:
        rollout_id, attempt_id = attempt
        try:
            sampling = await self._sampling_of(rollout_id, attempt_id)
        finally:
            del self._lookups[attempt]
        known = self._find(attempt)
        if known is not None or sampling is not None:
            self.forget(rollout_id)
        if sampling is not None:
            known = known or OpenAttempt(attempt_id)
            self._known[rollout_id] = replace(known, confirmed=time.monotonic(), sampling=sampling)
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]


async def call_summary(base_url: str, names: Iterable[str] = ()) -> CallSummary | None:
    """The summary of the calls that an attempt has made to its ``base_url``; None if the proxy does not answer."""
    import aiohttp

    limit = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(f"{base_url.rstrip('/')}/{CALLS_PATH}", json={"names": list(names)}) as reply,
        ):
            reply.raise_for_status()
            return CallSummary(**await reply.json())
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, TypeError):
        return None


def _failure(call: LLMCall) -> str:
    reason = call.untrainable_reason
    return reason if reason.startswith("failed") and call.status not in _REQUEST_REFUSED else ""


def _made_up(names: Collection[str], calls: Iterable[LLMCall]) -> list[str]:
    written, was_given = list[str](), list[str]()
    for call in calls:
        written += texts_in(call.reply)
        was_given += texts_in([message for message in call.messages if message.get("role") != "assistant"])
    return [name for name in names if _is_in(name, written) and not _is_in(name, was_given)]


def _is_in(name: str, texts: Iterable[str]) -> bool:
    whole = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", re.IGNORECASE)
    return any(whole.search(text) for text in texts)
