"""The runners: many rollouts on one event loop. Agents mostly wait for the model, so one process runs many rollouts."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from groundwire.adapters.tracing.spans import SpanStore
from groundwire.train.rollouts.runner.agent import RemoteRolloutAgent, RolloutAgent
from groundwire.train.rollouts.runner.attempts import OpenAttempts
from groundwire.train.store.runner_client import RunnerClient
from groundwire.train.store.wire import AttemptedRollout, RunnerStore

__all__ = ["NOTIFIED_POLL_S", "POLL_S", "RunnerPool"]

_log = logging.getLogger(__name__)
POLL_S = 0.25
"""How often an idle pool asks a store in another process for rollouts, in seconds."""
NOTIFIED_POLL_S = 5.0
"""The same where the pool is notified of new rollouts: only returned ones wait for it."""
_STOP_S = 5.0
_MIN_HEARTBEAT_S = 0.1


class RunnerPool:
    """Runs up to ``n_runners`` rollouts of ``store`` at once.

    ``store`` is a :class:`RunnerClient`, or any store of Agent Lightning. The pool takes as many rollouts as it can run
    with one request: when it is notified, when a rollout has ended, and every ``poll_s`` seconds. To the store it is
    one worker.
    """

    def __init__(
        self,
        *,
        store: RunnerStore,
        agent: RolloutAgent | RemoteRolloutAgent,
        n_runners: int,
        poll_s: float = NOTIFIED_POLL_S,
    ) -> None:
        self._store, self._agent, self._n_runners, self._poll_s = store, agent, n_runners, poll_s
        self._spans = store if isinstance(store, RunnerClient) else _span_sink(store)
        self._notification, self._stopping = asyncio.Event(), asyncio.Event()
        self._attempts = OpenAttempts(self._spans)
        self._emitters = _emission_tracer()
        self._rollouts: set[asyncio.Task[None]] = set()
        self._dispatcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to take rollouts."""
        if self._n_runners:
            if self._emitters is not None:
                self._emitters.start()
            self._dispatcher = asyncio.create_task(self._dispatch(), name="runner-pool")

    def notify(self) -> None:
        """Rollouts have been enqueued: take them now instead of at the next poll."""
        self._notification.set()

    async def stop(self) -> None:
        """Take no more rollouts; interrupt the running ones, so that the store gives them to another runner."""
        self._stopping.set()
        self._notification.set()
        self._attempts.interrupt()
        if self._dispatcher is not None:
            await asyncio.wait([self._dispatcher], timeout=_STOP_S)
            tasks = [self._dispatcher, *self._rollouts]  # left if the store does not answer
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._emitters is not None:
                self._emitters.stop()
        await self._attempts.close()

    async def _dispatch(self) -> None:
        while not self._stopping.is_set():
            self._notification.clear()
            for rollout in await self._take(self._n_runners - len(self._rollouts)):
                task = asyncio.create_task(self._run(rollout), name=rollout.rollout_id)
                self._rollouts.add(task)
                task.add_done_callback(self._forget)
            with suppress(asyncio.TimeoutError):
                idle = len(self._rollouts) < self._n_runners
                await asyncio.wait_for(self._notification.wait(), self._poll_s if idle else None)
        if self._rollouts:
            await asyncio.wait(self._rollouts)

    def _forget(self, rollout: asyncio.Task[None]) -> None:
        self._rollouts.discard(rollout)
        self._notification.set()

    async def _take(self, limit: int) -> Sequence[AttemptedRollout]:
        if not limit:
            return []
        worker_id = f"{socket.gethostname()}-{os.getpid()}"
        try:
            return await self._store.dequeue_many_rollouts(limit=limit, worker_id=worker_id)
        except Exception as error:
            _log.warning("the runners could not take rollouts: %s", error)
            return []

    async def _run(self, rollout: AttemptedRollout) -> None:
        heartbeat = asyncio.create_task(self._send_heartbeats(rollout))
        try:
            await self._run_attempt(rollout)
        except Exception as error:  # the store failed before the agent was started, or after its end
            _log.warning("rollout %.100r could not be run: %s", rollout.rollout_id, error)
        finally:
            heartbeat.cancel()

    async def _run_attempt(self, rollout: AttemptedRollout) -> None:
        resources = await self._resources(rollout)
        status = "failed"
        try:
            async with self._attempts.open(rollout):
                report = await self._agent.run(rollout, resources, self._store)
            await report.store(self._spans, rollout)
            status = "failed" if report.failed else "succeeded"
        except Exception:  # the attempt failed: the store gives the rollout to another runner, or ends it
            _log.debug("rollout %.100r failed", rollout.rollout_id, exc_info=True)
        finally:
            await self._store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status=status)

    async def _resources(self, rollout: AttemptedRollout) -> Mapping[str, Any]:
        if rollout.resources_id:
            update = await self._store.get_resources_by_id(rollout.resources_id)
        else:
            update = await self._store.get_latest_resources()
        if update is None:
            raise LookupError(f"the store has no resources {rollout.resources_id or ''}".rstrip())
        return update.resources

    async def _send_heartbeats(self, rollout: AttemptedRollout) -> None:
        """Keep the store from giving the rollout of a slow agent to another runner."""
        unresponsive_s = rollout.config.unresponsive_seconds
        if unresponsive_s is None:
            return
        store, attempt, began = self._store, rollout.attempt, time.monotonic()
        while True:
            await asyncio.sleep(max(unresponsive_s / 3, _MIN_HEARTBEAT_S))
            with suppress(Exception):  # a lasting problem of the store is reported where rollouts need it
                now = await store.get_rollout_by_id(rollout.rollout_id)
                current = getattr(now, "attempt", None)
                if current is None or current.attempt_id != attempt.attempt_id:
                    return
                if now.status in ("cancelled", "succeeded", "failed"):
                    return  # a heartbeat would set it to running again
                # In the time of the store, whose clock may differ.
                heartbeat_time = attempt.start_time + time.monotonic() - began
                await store.update_attempt(rollout.rollout_id, attempt.attempt_id, last_heartbeat_time=heartbeat_time)


def _span_sink(store: Any) -> SpanStore:
    from groundwire.train.store.spans import LightningSpanSink

    return LightningSpanSink(store)


def _emission_tracer() -> Any:
    """The tracer of Agent Lightning's emitters, which an agent may use where that is installed; else None."""
    try:
        from groundwire.train.rollouts.runner.lightning_agents import EmissionTracer
    except ImportError as error:
        if error.name != "agentlightning":  # it is installed, for example as version 1.0, which is another program
            _log.warning("agents cannot emit rewards: the agentlightning of this environment is not 0.3 (%s)", error)
        return None
    return EmissionTracer()
