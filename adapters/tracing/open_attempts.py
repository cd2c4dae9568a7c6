"""Which attempts may call the policy: those that the store has given to a runner and that have not ended.

An attempt's address is made of its two ids, 80 random bits, which only the store lists. So an agent knows the address
of its own attempt and cannot guess another's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from groundwire.adapters.tracing.wire.errors import RefusedError

__all__ = ["OpenAttempts"]

_FRESH_S = 1.0
"""How long an answer of the store holds."""
_FIRST_LOOKUP_S, _LOOKUP_S = 10.0, 1.0
"""How long a call waits for the store: the first of an attempt, and later ones, which go on without an answer."""
_MAX_KNOWN = 10_000
_Attempt = tuple[str, str]


class OpenAttempts:
    """Asks ``is_open(rollout_id, attempt_id)``, at most once a second for each attempt, on one event loop."""

    def __init__(self, is_open: Callable[[str, str], Awaitable[bool]]) -> None:
        self._is_open = is_open
        self._known: dict[str, tuple[str, float]] = {}  # a rollout has one open attempt: its id, when it was confirmed
        self._lookups: dict[_Attempt, asyncio.Task[None]] = {}

    async def check(self, rollout_id: str, attempt_id: str) -> None:
        """Raise :class:`RefusedError` if the attempt is not open (410), or the store does not answer (503)."""
        attempt = rollout_id, attempt_id
        known_id, confirmed = self._known.get(rollout_id, ("", 0.0))
        is_known = known_id == attempt_id
        if is_known and time.monotonic() - confirmed < _FRESH_S:
            return
        lookup = self._lookups.get(attempt)
        if lookup is None:
            lookup = self._lookups[attempt] = asyncio.create_task(self._look_up(attempt))
        await asyncio.wait([lookup], timeout=_LOOKUP_S if is_known else _FIRST_LOOKUP_S)
        error = lookup.exception() if lookup.done() and not lookup.cancelled() else None
        if self._known.get(rollout_id, ("",))[0] == attempt_id:
            return
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

    async def _look_up(self, attempt: _Attempt) -> None:
        rollout_id, attempt_id = attempt
        try:
            is_open = await self._is_open(rollout_id, attempt_id)
        finally:
            del self._lookups[attempt]
        if is_open:
            self._known.pop(rollout_id, None)
            self._known[rollout_id] = attempt_id, time.monotonic()
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        elif self._known.get(rollout_id, ("",))[0] == attempt_id:
            del self._known[rollout_id]
