"""Many of agentlightning's runners on one event loop.

Agents wait for the model most of the time, so a rollout needs a coroutine, not a process.

Of the runners that have nothing to do, one asks the store now and then and rings for the others: a store far away is
asked a few times a second, however many runners there are.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agentlightning.litagent import LitAgent
from agentlightning.runner.agent import LitAgentRunner
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout

from groundwire.train.rollouts.tracer import RolloutTracer

__all__ = ["POLL_S", "RunnerPool"]

POLL_S = 0.25
"""How often a store in another process is asked for work."""
_FAREWELL_S = 5.0


class _Bell:
    """Rings when rollouts are enqueued; counts its rings, so that one between a poll and the wait is not missed."""

    def __init__(self) -> None:
        self.rings = 0
        self.scouted = False
        """Whether one of those who wait asks the store from time to time."""
        self._event = asyncio.Event()

    def ring(self) -> None:
        self.rings += 1
        self._event.set()
        self._event.clear()

    async def wait(self, timeout: float | None) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout)


class _WakingRunner(LitAgentRunner[Any]):
    """agentlightning's runner, woken when rollouts are enqueued rather than after its next poll."""

    def __init__(
        self, tracer: RolloutTracer, bell: _Bell, poll_interval: float, on_attempt_end: Callable[[str], None]
    ) -> None:
        super().__init__(tracer=tracer, poll_interval=poll_interval, heartbeat_interval=0)
        self._bell, self._heard, self._on_attempt_end = bell, 0, on_attempt_end
        self._scout = False

    def get_worker_id(self) -> str:
        # There may be runners elsewhere.
        return f"{socket.gethostname()}-{os.getpid()}-{self.worker_id}"

    async def _step_impl(self, next_rollout: AttemptedRollout, raise_on_exception: bool = False) -> str:
        if self._scout:  # where there is one rollout there may be more
            self._bell.ring()
        heart = asyncio.create_task(self._beat(next_rollout))
        try:
            return await super()._step_impl(next_rollout, raise_on_exception)
        finally:
            heart.cancel()
            self._on_attempt_end(next_rollout.rollout_id)

    async def _beat(self, rollout: AttemptedRollout) -> None:
        """Say that the attempt is alive, where the store would otherwise give it to another runner."""
        patience = rollout.config.unresponsive_seconds
        if patience is None:
            return
        store, attempt, began = self.get_store(), rollout.attempt, time.monotonic()
        while True:
            await asyncio.sleep(patience / 3)
            with suppress(Exception):  # what is wrong with the store will show where it matters
                now = await store.get_rollout_by_id(rollout.rollout_id)
                if not isinstance(now, AttemptedRollout) or now.attempt.attempt_id != attempt.attempt_id:
                    return
                if now.status in ("cancelled", "succeeded", "failed"):
                    return  # a sign of life would set it going again
                # In the store's own time: its clock may differ from the one here.
                alive = attempt.start_time + time.monotonic() - began
                await store.update_attempt(rollout.rollout_id, attempt.attempt_id, last_heartbeat_time=alive)

    async def _sleep_until_next_poll(self, event: Any = None) -> None:
        if self._heard == self._bell.rings:
            self._scout = not self._bell.scouted
            self._bell.scouted = True
            try:
                await self._bell.wait(self._poll_interval if self._scout else None)
            finally:
                if self._scout:
                    self._bell.scouted = False
        self._heard = self._bell.rings


class RunnerPool:
    """``n_runners`` rollouts at once, taken from ``store`` as they come.

    ``poll_interval`` (seconds) is how often a store that cannot wake idle runners is asked. ``on_attempt_end`` is told
    the id of each rollout whose attempt ended, whether it will be retried or not.
    """

    def __init__(
        self,
        *,
        store: LightningStore,
        agent: LitAgent[Any],
        n_runners: int,
        poll_interval: float = 5.0,
        on_attempt_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store, self._agent, self._n, self._poll = store, agent, n_runners, poll_interval
        self._on_attempt_end = on_attempt_end
        self._bell, self._stopping = _Bell(), asyncio.Event()
        self._tracer = RolloutTracer(self._stopping)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start taking rollouts."""
        for worker in range(self._n):
            runner = _WakingRunner(self._tracer, self._bell, self._poll, self._on_attempt_end)
            runner.init(self._agent)
            runner.init_worker(worker, self._store)
            work = runner.iter(event=self._stopping)
            self._tasks.append(asyncio.create_task(work, name=f"runner-{worker}"))

    def wake(self) -> None:
        """Tell idle runners that something was enqueued."""
        self._bell.ring()

    async def stop(self) -> None:
        """Take no more; what runs is interrupted and given back to the store, for another runner to try."""
        self._stopping.set()
        self._bell.ring()
        for task in list(self._tracer.tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FAREWELL_S)
        for task in self._tasks:  # the store is away: it will notice by itself
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._tracer.close()
