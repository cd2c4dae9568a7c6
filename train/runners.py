"""Many of agentlightning's runners on one event loop.

Agents wait for the model most of the time, so a rollout needs a coroutine, not a process. agentlightning's own tracers
hold one active trace per process and would serialise them; here the LLM calls are traced by the proxy, so the runner's
tracer has only to know when the agent is at work.

Of the runners that have nothing to do, one asks the store now and then and rings for the others: a store far away is
asked a few times a second, however many runners there are.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import agentlightning as agl
from agentlightning.tracer import Tracer

__all__ = ["POLL_S", "RunnerPool"]

POLL_S = 0.25
"""How often a store in another process is asked for work."""
_FAREWELL_S = 5.0


class _StoppedError(Exception):
    """The pool stops; the rollout is for another runner."""


class _AtWork(Tracer):
    """A tracer that leaves tracing to the proxy, and so may be entered by any number of rollouts at once.

    ``tasks`` are those whose agent is at work: they may be cancelled, and their attempt then fails, so that the store
    gives the rollout to another runner. (Cancelled anywhere else, agentlightning's runner reports a success.)
    """

    def __init__(self, stopping: asyncio.Event) -> None:
        super().__init__()
        self._stopping = stopping
        self.tasks: set[asyncio.Task[Any]] = set()

    def trace_context(self, name: str | None = None, **_: Any) -> AbstractAsyncContextManager[Any]:
        return self._at_work()

    @asynccontextmanager
    async def _at_work(self) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            if self._stopping.is_set():
                raise _StoppedError
            yield
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            raise _StoppedError from None
        finally:
            self.tasks.discard(task)

    def get_last_trace(self) -> list[agl.Span]:
        return []


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


class _WakingRunner(agl.LitAgentRunner[Any]):
    """agentlightning's runner, woken when rollouts are enqueued rather than after its next poll."""

    def __init__(
        self, tracer: _AtWork, bell: _Bell, poll_interval: float, on_attempt_end: Callable[[str], None]
    ) -> None:
        super().__init__(tracer=tracer, poll_interval=poll_interval, heartbeat_interval=0)
        self._bell, self._heard, self._on_attempt_end = bell, 0, on_attempt_end
        self._scout = False

    def get_worker_id(self) -> str:
        # There may be runners elsewhere.
        return f"{socket.gethostname()}-{os.getpid()}-{self.worker_id}"

    async def _step_impl(self, next_rollout: agl.AttemptedRollout, raise_on_exception: bool = False) -> str:
        if self._scout:  # where there is one rollout there may be more
            self._bell.ring()
        heart = asyncio.create_task(self._beat(next_rollout))
        try:
            return await super()._step_impl(next_rollout, raise_on_exception)
        finally:
            heart.cancel()
            self._on_attempt_end(next_rollout.rollout_id)

    async def _beat(self, rollout: agl.AttemptedRollout) -> None:
        """Say that the attempt is alive, where the store would otherwise give it to another runner."""
        patience = rollout.config.unresponsive_seconds
        if patience is None:
            return
        store, attempt, began = self.get_store(), rollout.attempt, time.monotonic()
        while True:
            await asyncio.sleep(patience / 3)
            with suppress(Exception):  # what is wrong with the store will show where it matters
                now = await store.get_rollout_by_id(rollout.rollout_id)
                if not isinstance(now, agl.AttemptedRollout) or now.attempt.attempt_id != attempt.attempt_id:
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
        store: agl.LightningStore,
        agent: agl.LitAgent[Any],
        n_runners: int,
        poll_interval: float = 5.0,
        on_attempt_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store, self._agent, self._n, self._poll = store, agent, n_runners, poll_interval
        self._on_attempt_end = on_attempt_end
        self._bell, self._stopping = _Bell(), asyncio.Event()
        self._tracer = _AtWork(self._stopping)
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
