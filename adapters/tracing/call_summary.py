"""What the proxy knows of the calls of a running attempt, for a runner that asks why its agent failed.

``POST {base URL}/calls`` with ``{"names": [...]}`` returns a :class:`CallSummary`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.wire.exchange import HttpExchange, read_exchange
from groundwire.tools.text import texts_in

__all__ = ["CALLS_PATH", "CallLog", "CallSummary", "call_summary"]

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
        running, ended = ([each for each in self._kept if bool(each.ended) == done] for done in (False, True))
        last = max(ended, key=lambda exchange: exchange.ended, default=None)
        return CallSummary(
            calls=self.count,
            running_s=now - min((each.started for each in running), default=now),
            idle_s=0.0 if running or last is None else now - last.ended,
            failure="" if last is None else _failure(read_exchange(last, 0, 0)),
            at_limit=self.at_limit,
            made_up=_made_up(names, [read_exchange(each, 0, 0) for each in ended if names]),
        )


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
    wrote, given = list[str](), list[str]()
    for call in calls:
        wrote += texts_in(call.reply)
        given += texts_in([message for message in call.messages if message.get("role") != "assistant"])
    return [name for name in names if _is_in(name, wrote) and not _is_in(name, given)]


def _is_in(name: str, texts: Iterable[str]) -> bool:
    whole = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", re.IGNORECASE)
    return any(whole.search(text) for text in texts)
