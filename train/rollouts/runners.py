"""The runners: many rollouts on one event loop, in this process or in several others.

Agents mostly wait for the model, so one process runs many rollouts (:class:`RunnerPool`). Hundreds of agents are
more work than one Python interpreter can do: :class:`RunnerProcesses` starts ``python -m train.runner`` on the run's
store, which is served to the processes on the loopback interface. They end when their standard input ends, so with this
process, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from agentlightning.litagent import LitAgent
from agentlightning.runner.agent import LitAgentRunner
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout

from groundwire.tools.http.access_token import VARIABLE
from groundwire.tools.startup import child_python_path
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.tracer import RolloutTracer
from groundwire.train.store.server import bind, serve

__all__ = ["POLL_S", "RunnerPool", "RunnerProcesses"]

_log = logging.getLogger(__name__)
POLL_S = 0.25
"""How often an idle pool asks a store in another process for rollouts, in seconds."""
_STOP_S = 5.0
_MIN_HEARTBEAT_S = 0.1


class RunnerPool:
    """Runs up to ``n_runners`` rollouts of ``store`` at once, with Agent Lightning's runner.

    The pool takes as many rollouts as it can run with one request: when it is notified, when a rollout has ended, and
    every ``poll_s`` seconds. To the store it is one worker.
    """

    def __init__(self, *, store: LightningStore, agent: LitAgent[Any], n_runners: int, poll_s: float = 5.0) -> None:
        self._store, self._agent, self._n_runners, self._poll_s = store, agent, n_runners, poll_s
        self._notification, self._stopping = asyncio.Event(), asyncio.Event()
        self._tracer = RolloutTracer(self._stopping)
        self._runner: LitAgentRunner[Any] = LitAgentRunner(tracer=self._tracer)
        self._rollouts: set[asyncio.Task[None]] = set()
        self._dispatcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to take rollouts."""
        if self._n_runners:
            self._runner.init(self._agent)
            self._runner.init_worker(0, self._store)
            self._dispatcher = asyncio.create_task(self._dispatch(), name="runner-pool")

    def notify(self) -> None:
        """Rollouts have been enqueued: take them now instead of at the next poll."""
        self._notification.set()

    async def stop(self) -> None:
        """Take no more rollouts; interrupt the running ones, so that the store gives them to another runner."""
        self._stopping.set()
        self._notification.set()
        for task in list(self._tracer.tasks):
            task.cancel()
        if self._dispatcher is not None:
            await asyncio.wait([self._dispatcher], timeout=_STOP_S)
            tasks = [self._dispatcher, *self._rollouts]  # left if the store does not answer
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._tracer.close()

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
            await self._runner._step_impl(rollout)
        except Exception as error:  # the store failed before the agent was started
            _log.warning("rollout %.100r could not be started: %s", rollout.rollout_id, error)
        finally:
            heartbeat.cancel()

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
                if not isinstance(now, AttemptedRollout) or now.attempt.attempt_id != attempt.attempt_id:
                    return
                if now.status in ("cancelled", "succeeded", "failed"):
                    return  # a heartbeat would set it to running again
                # In the time of the store, whose clock may differ.
                heartbeat_time = attempt.start_time + time.monotonic() - began
                await store.update_attempt(rollout.rollout_id, attempt.attempt_id, last_heartbeat_time=heartbeat_time)


class RunnerProcesses:
    """``config.runner_processes`` processes, which together run ``config.n_runners`` rollouts at once."""

    def __init__(self, store: LightningStore, config: RunConfig) -> None:
        self._config = config
        self._token = secrets.token_urlsafe(32)
        self._server = serve(store, bind("127.0.0.1", 0), token=self._token)
        self._processes: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        """Serve the store and start the processes; they take rollouts as soon as they are ready."""
        address, config = await self._server.__aenter__(), self._config
        runners_each = -(-config.n_runners // config.runner_processes)
        command = [sys.executable, "-m", "groundwire.train.runner", "--until-eof", "--external-store-address", address]
        command += ["--n-runners", str(runners_each), *config.runner_options()]
        # The GPUs are for the trainer, and each runner gets one CPU thread.
        settings = {"PYTHONPATH": child_python_path(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        settings[VARIABLE] = self._token
        for _ in range(config.runner_processes):
            # asyncio's own subprocesses need a child watcher, which the policy of uvloop (set by Ray) does not have.
            process = subprocess.Popen(  # noqa: ASYNC220, S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **settings},
            )
            self._processes.append(process)

    def failure(self) -> str:
        """A message if all processes have ended, which none should; "" as long as one is running."""
        codes = [process.poll() for process in self._processes]
        if None in codes:
            return ""
        statuses = ", ".join(sorted({str(code) for code in codes}))
        return f"all {len(codes)} runner processes have ended, with status {statuses}: nothing runs agents any more"

    async def stop(self) -> None:
        """End the processes; the store gives their rollouts to other runners."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        await asyncio.gather(*(asyncio.to_thread(_wait_or_kill, process) for process in self._processes))
        await self._server.__aexit__(None, None, None)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
