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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.spans import CallSink
from groundwire.adapters.tracing.wire.exchange import HttpExchange, read_exchange
from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.tools import clock
from groundwire.tools.text import texts_in

_FRESH_S = 1.0  # how long an answer of the store holds
_FIRST_LOOKUP_S, _LOOKUP_S = 10.0, 1.0
"""How long a call waits for the store: the first of an attempt, and later ones, which go on without an answer."""
_MAX_KNOWN = 10_000
CALLS_PATH = "calls"
_REQUEST_REFUSED = (400, 413, 422)  # the statuses of a request that is too long or wrong
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
    cut_off: bool
    """Whether ``max_tokens`` ended the last reply."""
    at_limit: bool
    """Whether a call was refused because the attempt had made ``max_calls``."""
    made_up: list[str]
    """The names that are in the policy's replies and in nothing that it was given."""


@dataclass(slots=True)
class OpenAttempt:
    """An attempt that may call the policy, and its calls, the last ones with their texts."""

    attempt_id: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's sampling parameters for the attempt."""
    confirmed: float = 0.0
    """When the store answered, in monotonic seconds."""
    calls: int = 0
    at_limit: bool = False
    """Whether a call was refused because of ``max_calls``."""
    _prompts: Counter[int] = field(default_factory=Counter)
    _last_calls: deque[HttpExchange] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT))

    def count_request(self, prompt: str) -> int:
        """The number of requests with the same prompt before this one."""
        key = hash(prompt)
        self._prompts[key] += 1
        return self._prompts[key] - 1

    def add_call(self, exchange: HttpExchange) -> None:
        """Add a call that begins."""
        self.calls += 1
        self._last_calls.append(exchange)

    def summary(self, names: Collection[str]) -> CallSummary:
        """The summary; ``names`` may be made up."""
        now = clock.now()
        running, ended = ([call for call in self._last_calls if bool(call.ended) == done] for done in (False, True))
        last = max(ended, key=lambda exchange: exchange.ended, default=None)
        last_call = None if last is None else read_exchange(last, 0, 0)
        reason = "" if last_call is None or last_call.status in _REQUEST_REFUSED else last_call.untrainable_reason
        return CallSummary(
            calls=self.calls,
            running_s=now - min((call.started for call in running), default=now),
            idle_s=0.0 if running or last is None else now - last.ended,
            failure=reason if reason.startswith("failed") else "",
            cut_off=last_call is not None and last_call.truncated,
            at_limit=self.at_limit,
            made_up=_made_up(names, [read_exchange(call, 0, 0) for call in ended if names]),
        )


class OpenAttempts:
    """The attempts that ``sink`` says are open; it is asked again after a second."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._known: dict[str, OpenAttempt] = {}  # by rollout, which has one open attempt

    async def check(self, rollout_id: str, attempt_id: str) -> OpenAttempt:
        """The attempt. Raises :class:`RefusedError` if it is not open (410), or the store does not answer (503)."""
        known = self._find(rollout_id, attempt_id)
        if known is not None and time.monotonic() - known.confirmed < _FRESH_S:
            return known
        try:
            limit = _FIRST_LOOKUP_S if known is None else _LOOKUP_S
            sampling = await asyncio.wait_for(self._sink.sampling_of(rollout_id, attempt_id), limit)
        except Exception as error:
            if known is not None:
                return known
            message = f"the store does not say whether the attempt is running: {str(error) or 'no answer'}"
            raise RefusedError(503, message) from error
        known = self._find(rollout_id, attempt_id)  # another call may have asked meanwhile
        if known is not None or sampling is not None:
            self.forget(rollout_id)
        if sampling is None:
            raise RefusedError(
                410,
                f"attempt {attempt_id!r:.60} of rollout {rollout_id!r:.60} is unknown or has ended: nothing is sampled "
                "for it; use the base URL that the agent was given",
            )
        known = self._known[rollout_id] = known or OpenAttempt(attempt_id)
        known.sampling, known.confirmed = sampling, time.monotonic()
        if len(self._known) > _MAX_KNOWN:
            self.forget(next(iter(self._known)))
        return known

    def forget(self, rollout_id: str) -> None:
        """Ask the store before the next call of the rollout."""
        self._known.pop(rollout_id, None)

    def _find(self, rollout_id: str, attempt_id: str) -> OpenAttempt | None:
        known = self._known.get(rollout_id)
        return known if known is not None and known.attempt_id == attempt_id else None


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


def _made_up(names: Collection[str], calls: Iterable[LLMCall]) -> list[str]:
    written, was_given = list[str](), list[str]()
    for call in calls:
        written += texts_in(call.reply)
        was_given += texts_in([message for message in call.messages if message.get("role") != "assistant"])
    return [name for name in names if _is_in(name, written) and not _is_in(name, was_given)]


def _is_in(name: str, texts: Iterable[str]) -> bool:
    whole = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", re.IGNORECASE)
    return any(whole.search(text) for text in texts)
