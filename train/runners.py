"""Many of agentlightning's runners on one event loop.

Agents wait for the model most of the time, so a rollout needs a coroutine, not a process. agentlightning's own tracers
hold one active trace per process and would serialise them; here the LLM calls are traced by the proxy, so the runner's
tracer has nothing to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import agentlightning as agl
from agentlightning.tracer import Tracer

from train.agent import RolloutAgent

__all__ = ["RunnerPool"]


class _ProxyTraced(Tracer):
    """A tracer that leaves tracing to the proxy, and so may be entered by any number of rollouts at once."""

    def trace_context(self, name: str | None = None, **_: Any) -> AbstractAsyncContextManager[Any]:
        return nullcontext()

    def get_last_trace(self) -> list[agl.Span]:
        return []


class _Bell:
    """Rings when rollouts are enqueued; counts its rings, so that one between a poll and the wait is not missed."""

    def __init__(self) -> None:
        self.rings = 0
        self._event = asyncio.Event()

    def ring(self) -> None:
        self.rings += 1
        self._event.set()
        self._event.clear()

    async def wait(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(self._event.wait(), timeout)
        except asyncio.TimeoutError:
            return


class _WakingRunner(agl.LitAgentRunner[dict[str, Any]]):
    """agentlightning's runner, woken when rollouts are enqueued rather than after its next poll."""

    def __init__(self, bell: _Bell, poll_interval: float, on_attempt_end: Callable[[str], None]) -> None:
        super().__init__(tracer=_ProxyTraced(), poll_interval=poll_interval, heartbeat_interval=0)
        self._bell, self._heard, self._on_attempt_end = bell, 0, on_attempt_end

    async def _step_impl(self, next_rollout: agl.AttemptedRollout, raise_on_exception: bool = False) -> str:
        rollout_id = await super()._step_impl(next_rollout, raise_on_exception)
        self._on_attempt_end(rollout_id)
        return rollout_id

    async def _sleep_until_next_poll(self, event: Any = None) -> None:
        if self._heard == self._bell.rings:
            await self._bell.wait(self._poll_interval)
        self._heard = self._bell.rings


class RunnerPool:
    """``n_runners`` rollouts at once, taken from ``store`` as they come.

    ``poll_interval`` (seconds) is how often an idle runner asks a store that cannot wake it. ``on_attempt_end`` is told
    the id of each rollout whose attempt ended, whether it will be retried or not.
    """

    def __init__(
        self,
        *,
        store: agl.LightningStore,
        agent: RolloutAgent,
        n_runners: int,
        poll_interval: float = 5.0,
        on_attempt_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store, self._agent, self._n, self._poll = store, agent, n_runners, poll_interval
        self._on_attempt_end = on_attempt_end
        self._bell = _Bell()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start taking rollouts."""
        for worker in range(self._n):
            runner = _WakingRunner(self._bell, self._poll, self._on_attempt_end)
            runner.init(self._agent)
            runner.init_worker(worker, self._store)
            self._tasks.append(asyncio.create_task(runner.iter(), name=f"runner-{worker}"))

    def wake(self) -> None:
        """Tell idle runners that something was enqueued."""
        self._bell.ring()

    async def stop(self) -> None:
        """Cancel what runs; an interrupted rollout stays unfinished in the store."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
