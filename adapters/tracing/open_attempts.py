"""Which attempts may call the policy, those that the store has given to a runner and that have not ended, and how
their replies are sampled.

An attempt's address is made of its two ids, 80 random bits, which only the store lists. So an agent knows the address
of its own attempt and cannot guess another's.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from groundwire.adapters.tracing.call_summary import CallLog
from groundwire.adapters.tracing.wire.errors import RefusedError

__all__ = ["OpenAttempt", "OpenAttempts"]

_FRESH_S = 1.0
"""How long an answer of the store holds."""
_FIRST_LOOKUP_S, _LOOKUP_S = 10.0, 1.0
"""How long a call waits for the store: the first of an attempt, and later ones, which go on without an answer."""
_MAX_KNOWN = 10_000
_Attempt = tuple[str, str]


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that may call the policy."""

    attempt_id: str
    confirmed: float
    """When the store answered, in monotonic seconds."""
    sampling: Mapping[str, Any]
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

    The argument is a sink's method (:meth:`groundwire.adapters.tracing.spans.CallSink.sampling_of`).
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
        if sampling is not None:
            found = OpenAttempt(attempt_id, time.monotonic(), sampling)
            if known is not None:
                found = replace(known, confirmed=found.confirmed, sampling=sampling)
            self._known.pop(rollout_id, None)
            self._known[rollout_id] = found
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        elif known is not None:
            del self._known[rollout_id]
