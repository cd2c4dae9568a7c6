"""Says that rollouts wait and nobody takes them: without it a trainer whose runners are elsewhere looks hung."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from agentlightning.store.base import LightningStore

__all__ = ["NoRunnerWarning"]

_log = logging.getLogger(__name__)


class NoRunnerWarning:
    """Looks whether runners are there, where they are not the trainer's own.

    Where no rollout ended for ``after_s`` seconds the store is asked whether one is under way, and again that much
    later. If none is, that is said: once, until one ends. ``start`` is the command that starts a runner.
    """

    def __init__(self, store: LightningStore, *, start: str, after_s: float = 10.0) -> None:
        self._store, self._start, self._after_s = store, start, after_s
        self._since, self._said = time.monotonic(), False

    def reset(self) -> None:
        """Rollouts were sent to the store, or one came back."""
        self._since, self._said = time.monotonic(), False

    async def look(self, waiting: Collection[str], *, ended: bool) -> None:
        """The rollouts ``waiting`` have not ended; ``ended`` is whether others have since the last look."""
        if ended:
            self.reset()
        if self._said or time.monotonic() - self._since < self._after_s:
            return
        self._since = time.monotonic()
        if await self._store.query_rollouts(status_in=["preparing", "running"], rollout_id_in=list(waiting), limit=1):
            return
        self._said = True
        _log.warning("%d rollouts wait, and no runner takes them: start one with: %s", len(waiting), self._start)
