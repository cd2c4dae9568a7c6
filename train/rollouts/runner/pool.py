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

from groundwire.adapters.tracing.call_writer import CallsNotStoredError, CallWriter
from groundwire.adapters.tracing.emitted_spans import Emissions, stored_by
from groundwire.tools.secrets import mask_secrets
from groundwire.train.rollouts.errors import RequestRefusedError
from groundwire.train.rollouts.runner.agent import RemoteRolloutAgent, RolloutAgent
from groundwire.train.rollouts.runner.emitters import Emitters
from groundwire.train.store.base import RolloutStore
from groundwire.train.store.rollout import Outcome, Rollout

_log = logging.getLogger(__name__)
WORKER_ID = "GROUNDWIRE_WORKER_ID"
"""The variable with the name of a trainer's runner process."""
POLL_S = 0.25
"""How often an idle pool asks a store in another process for rollouts, in seconds."""
NOTIFIED_POLL_S = 5.0
"""The same where the pool is notified of new rollouts: only returned ones wait for it."""
_STOP_S = 5.0
_CLOSE_S = 5.0
_FLUSH_S = 120.0
_MIN_HEARTBEAT_S = 0.1
_MAX_MESSAGE = 2000
_KINDS = {RequestRefusedError: RequestRefusedError.kind, CallsNotStoredError: "not_stored"}
"""The types of failures of rollouts that a pool cannot run to their ends."""


class RunnerPool:
    """Runs up to ``n_runners`` rollouts of ``store`` at once.

    The pool takes as many rollouts as it can run with one request: when it is notified, when a rollout has ended, and
    every ``poll_s`` seconds. To the store it is one worker, ``worker_id`` (default: host and process).
    """

    def __init__(
        self,
        *,
        store: RolloutStore,
        agent: RolloutAgent | RemoteRolloutAgent,
        n_runners: int,
        poll_s: float = NOTIFIED_POLL_S,
        worker_id: str | None = None,
    ) -> None:
        self._worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self._store, self._agent, self._n_runners, self._poll_s = store, agent, n_runners, poll_s
        self._notification, self._stopping = asyncio.Event(), asyncio.Event()
        self._writer: CallWriter | None = None
        """Of the spans that agents emit."""
        self._rollouts: set[asyncio.Task[None]] = set()
        self._in_agents: set[asyncio.Task[Any]] = set()
        """Those whose agents run."""
        self._dispatcher: asyncio.Task[None] | None = None
        self._said_why = False

    async def start(self) -> None:
        """Start to take rollouts."""
        if self._n_runners:
            Emitters.count_pools(1)
            self._dispatcher = asyncio.create_task(self._dispatch(), name="runner-pool")

    def notify(self) -> None:
        """Rollouts have been enqueued: take them now instead of at the next poll."""
        self._notification.set()

    async def stop(self) -> None:
        """Take no more rollouts; interrupt the running ones, so that the store gives them to another runner."""
        self._stopping.set()
        self._notification.set()
        for task in list(self._in_agents):
            task.cancel()
        if self._dispatcher is not None:
            await asyncio.wait([self._dispatcher], timeout=_STOP_S)
            left = [self._dispatcher, *self._rollouts]  # if the store does not answer
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            Emitters.count_pools(-1)
        if self._writer is not None:
            with suppress(CallsNotStoredError):  # of attempts that another runner repeats
                await self._writer.close(timeout_s=_CLOSE_S)

    async def _dispatch(self) -> None:
        while not self._stopping.is_set():
            self._notification.clear()
            possible, why = self._agent.at_once(self._n_runners)
            wanted = max(0, possible - len(self._rollouts))
            taken = await self._take(wanted)
            if why and not self._said_why and wanted == len(taken) > 0:
                self._said_why = True
                _log.warning("%d rollouts run at once: %s", possible, why)
            for rollout in taken:
                task = asyncio.create_task(self._run(rollout), name=rollout.rollout_id)
                self._rollouts.add(task)
                task.add_done_callback(self._rollouts.discard)
                task.add_done_callback(lambda _: self._notification.set())
            with suppress(asyncio.TimeoutError):
                idle = len(self._rollouts) < self._n_runners
                await asyncio.wait_for(self._notification.wait(), self._poll_s if idle else None)
        if self._rollouts:
            await asyncio.wait(self._rollouts)

    async def _take(self, limit: int) -> Sequence[Rollout]:
        try:
            return await self._store.dequeue(limit, self._worker_id) if limit else []
        except Exception as error:
            _log.warning("the runners could not take rollouts: %s", error)
            return []

    async def _run(self, rollout: Rollout) -> None:
        task, heartbeat = asyncio.current_task(), asyncio.create_task(self._send_heartbeats(rollout))
        assert task is not None
        attempt_id = rollout.attempts[-1].attempt_id  # now: a store in this process may start another one meanwhile
        outcome: Outcome | None = None
        failed = True
        try:
            self._in_agents.add(task)
            try:
                if not self._stopping.is_set():
                    outcome, failed = await self._run_agent(rollout)
            except Exception as error:  # the attempt failed: the store gives the rollout to another runner, or ends it
                _log.debug("rollout %.100r failed", rollout.rollout_id, exc_info=True)
                kind = _KINDS.get(type(error))
                message = str(error) if kind else f"the runner failed: {error!r}"
                outcome = Outcome(failure=kind or "no_result", message=mask_secrets(message)[:_MAX_MESSAGE])
            finally:  # also when the pool stops, which cancels this task
                self._in_agents.discard(task)
                await self._store.end_attempt(rollout.rollout_id, attempt_id, outcome, failed=failed)
        except Exception as error:  # the store failed
            _log.warning("the end of rollout %.100r could not be stored: %s", rollout.rollout_id, error)
        finally:
            heartbeat.cancel()

    async def _run_agent(self, rollout: Rollout) -> tuple[Outcome, bool]:
        """Raises :class:`RequestRefusedError` if the store has no resources for the rollout, and
        :class:`CallsNotStoredError` if it refuses a span that the agent emitted.
        """
        rollout_id, resources = rollout.rollout_id, await self._resources(rollout.resources_id)
        writer = self._writer = self._writer or CallWriter(self._store, self._store.add_annotations)
        store = stored_by(writer, rollout_id=rollout_id, attempt_id=rollout.attempts[-1].attempt_id)
        try:
            with Emissions(store, rollout.trace_limit).activate():
                return await self._agent.run(rollout, resources, self._store)
        finally:
            await writer.flush(rollout_id, timeout_s=_FLUSH_S)

    async def _resources(self, resources_id: str | None) -> Mapping[str, Any]:
        name = f"resources {resources_id!r:.100}" if resources_id else "resources"
        try:
            resources = await self._store.get_resources(resources_id)
        except ValueError as error:
            raise RequestRefusedError(f"the {name} in the store cannot be read: {error}") from error
        if resources is None:
            raise RequestRefusedError(f"the store has no {name}: store them before the rollouts that name them")
        return resources

    async def _send_heartbeats(self, rollout: Rollout) -> None:
        if rollout.unresponsive_s is None:
            return
        attempt, began = rollout.attempts[-1], time.monotonic()
        while True:
            await asyncio.sleep(max(rollout.unresponsive_s / 3, _MIN_HEARTBEAT_S))
            with suppress(Exception):  # a lasting problem of the store is reported where rollouts need it
                # In the time of the store, whose clock may differ.
                now = attempt.started + time.monotonic() - began
                if not await self._store.heartbeat(rollout.rollout_id, attempt.attempt_id, now):
                    return
