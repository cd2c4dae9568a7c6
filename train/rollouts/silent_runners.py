"""Runners in other processes that give no sign of life: no run goes on with fewer of them without saying so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groundwire.train.store.base import RolloutStore
from groundwire.train.store.errors import StoreFailedError

_log = logging.getLogger(__name__)
_LOOKS = 6
"""Looks without a new sign after which a runner is silent."""


@dataclass(slots=True)
class _Runner:
    sign: Any
    is_ours: bool
    """Whether it has lived in this run: a store also knows those of earlier ones."""
    quiet_looks: int = 0


class SilentRunners:
    """Looks at the runners of ``store`` while rollouts are awaited; one without a sign for ``silent_s`` seconds of that
    is silent. Each takes rollouts or tells of those that it runs more often than that.

    ``end`` gets the worker's id of a silent one. By default it is said, as when it is heard of again.
    """

    def __init__(self, store: RolloutStore, *, silent_s: float, end: Callable[[str], None] | None = None) -> None:
        self.lost = 0
        """How often a runner became silent."""
        self._store, self._silent_s, self._end = store, silent_s, end
        self._runners: dict[str, _Runner] = {}
        self._next: float | None = 0.0

    async def look(self) -> None:
        """Compare the signs of life with those of the last look, unless that was just now."""
        now = time.monotonic()
        if self._next is None or now < self._next:
            return
        began, self._next = bool(self._next), now + self._silent_s / _LOOKS
        try:
            signs = await self._store.signs_of_life()
        except (ValueError, StoreFailedError) as error:  # a store of Agent Lightning's without this list
            self._next = None
            _log.warning("a runner that is lost will not be noticed: %s", error)
            return
        for worker_id, sign in signs.items():
            runner = self._runners.setdefault(worker_id, _Runner(sign, is_ours=began))
            if runner.sign != sign:
                if runner.quiet_looks >= _LOOKS and self._end is None:
                    _log.warning("runner %.100s is heard of again", worker_id)
                runner.sign, runner.is_ours, runner.quiet_looks = sign, True, 0
            elif runner.is_ours:
                runner.quiet_looks += 1
                if runner.quiet_looks == _LOOKS:
                    self._note_silent(worker_id)

    def _note_silent(self, worker_id: str) -> None:
        if self._end is not None:
            self._end(worker_id)
            return
        self.lost += 1
        left = sum(runner.is_ours and runner.quiet_looks < _LOOKS for runner in self._runners.values())
        _log.warning(
            "runner %.100s has not been heard of for %g s, so its rollouts go to others: %s",
            worker_id,
            self._silent_s,
            f"{left} of this store's are left" if left else "no other is left",
        )
