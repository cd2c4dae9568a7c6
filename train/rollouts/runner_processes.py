"""Runners in several processes.

Hundreds of agents are more work than one Python interpreter can do: :class:`RunnerProcesses` starts ``python -m
train.runner`` on the run's store, which is served to the processes on the loopback interface. A line on their standard
input tells them that there are rollouts. With the setting ``runner_python`` they run with the interpreter of the
agent's own environment, which needs no package of the trainer's.

A process that ends is started again, its rollouts are tried again at once, and it is said. The processes and all that
they have started end with this one, however it ends: each is below a guard
(:mod:`groundwire.adapters.agents.process.guard`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from groundwire.adapters.agents.process.guard import guarded, how_ended
from groundwire.tools.errors import UserError
from groundwire.tools.http.access_token import VARIABLE
from groundwire.tools.startup import USERS_PYTHON_PATH, activated, child_python_path
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.runner.pool import WORKER_ID
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.server import bind, serve

_log = logging.getLogger(__name__)
_CHECK_S = 0.1
_STOP_S = 0.7
_GRACE_S = 0.3
"""In which what a process has started ends by itself, after the process."""
_MOST_LOSSES = 5
"""Losses of each process, without a rollout that ended in between, which end a run."""
_FIRST_DELAY_S, _LAST_DELAY_S = 0.5, 30.0
"""Before a lost process is started again: twice as long after each further one without a rollout that ended."""
_LATE_S, _START_S = 60.0, 300.0
"""After how long a start is said to go on, and how long it may take: it imports the agent."""


@dataclass(kw_only=True, eq=False)
class _Runner:
    """One of the processes, and those that took its place."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started: float = 0.0
    has_begun: bool = False
    """Whether it has asked for rollouts."""
    is_late: bool = False
    end: str = ""
    """How it has ended; "" while it runs."""
    losses: int = 0
    """Since a rollout ended."""
    again_at: float = 0.0

    @property
    def worker_id(self) -> str:
        """The process's name in the store."""
        return f"{socket.gethostname()}-{os.getpid()} {self.name}, start {self.starts}"


class RunnerProcesses:
    """``config.runner_processes`` processes, which together run ``config.n_runners`` rollouts at once.

    ``bundled`` is the folder of the domain's bundled data: another environment has a copy at another path.
    """

    def __init__(self, store: LightningStore, config: RunConfig, *, bundled: Path | None = None) -> None:
        self.lost = 0
        """How often a process was lost."""
        self._config = config
        if config.runner_python and config.data_dir is None and bundled is not None:
            self._config = config.model_copy(update={"data_dir": str(bundled)})
        self._token = secrets.token_urlsafe(32)
        self._store, self._server = store, serve(store, bind("127.0.0.1", 0), token=self._token)
        count = config.runner_processes or 1
        names = (f"runner process {number} of {count}" for number in range(1, count + 1))
        self._runners = [_Runner(name=name) for name in names]
        self._notifying = self._any_begun = False
        self._attempts_ended = store.attempts_ended
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve the store and start the processes; they take rollouts as soon as they are ready."""
        address, config = await self._server.__aenter__(), self._config
        runners_each = -(-config.n_runners // len(self._runners))
        python = config.runner_python or sys.executable
        command = [python, "-m", "groundwire.train.runner", "--until-eof"]
        command += ["--external-store-address", address, "--n-runners", str(runners_each), *config.runner_options()]
        # The GPUs are for the trainer, and each runner gets one CPU thread.
        settings = {VARIABLE: self._token, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if config.runner_python is None:
            settings["PYTHONPATH"] = child_python_path()
        elif (users := os.environ.get(USERS_PYTHON_PATH)) is not None:  # another environment has its own packages
            settings["PYTHONPATH"] = users
        self._command, self._environment = guarded(command, grace_s=_GRACE_S), {**activated(python), **settings}
        for runner in self._runners:
            self._start(runner)
        self._supervisor = asyncio.create_task(self._supervise(), name="runner-processes")

    def notify(self) -> None:
        """Rollouts have been enqueued: the processes take them now instead of at the next poll."""
        if not self._notifying:  # once for all that this turn of the event loop enqueues
            self._notifying = True
            asyncio.get_running_loop().call_soon(self._write_lines)

    def _write_lines(self) -> None:
        self._notifying = False
        for runner in self._runners:
            if runner.process is not None and runner.process.stdin is not None and not runner.process.stdin.closed:
                with suppress(BrokenPipeError, BlockingIOError):  # the process has ended, or does not read
                    os.write(runner.process.stdin.fileno(), b"\n")

    def end(self, worker_id: str) -> None:
        """End a process that gives no sign of life; it is started again."""
        for runner in self._runners:
            if runner.process is not None and not runner.end and runner.worker_id == worker_id:
                _log.warning("%s does not answer: it is ended", runner.name)
                _terminate(runner.process)

    def failure(self) -> str:
        """Why nothing runs agents any more; "" as long as a process runs, or may run again."""
        if not all(runner.end for runner in self._runners):
            return ""
        losses, ends = sum(runner.losses for runner in self._runners), {runner.end for runner in self._runners}
        count = len(self._runners)
        ended = f"all {count} runner processes have ended" if count > 1 else "the runner process has ended"
        if not any(map(self._may_start, self._runners)):
            return f"{ended}, with {', '.join(sorted(ends))}: nothing runs agents any more"
        if any(runner.losses < _MOST_LOSSES for runner in self._runners):
            return ""
        return (
            f"{ended} again and again, {losses} times without a rollout that ended, the last time with "
            f"{', '.join(sorted(ends))}: see what they printed, and whether the machine has memory for them"
        )

    async def stop(self) -> None:
        """End the processes; the store gives their rollouts to other runners."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        processes = [runner.process for runner in self._runners if runner.process is not None]
        for process in processes:
            _close_input(process)
        for end in (_terminate, subprocess.Popen.kill):
            for process in await _running_still(processes):
                end(process)
        await _running_still(processes)
        await self._server.__aexit__(None, None, None)

    def _start(self, runner: _Runner) -> None:
        runner.starts, runner.started, runner.end = runner.starts + 1, time.monotonic(), ""
        runner.has_begun = runner.is_late = False
        # asyncio's own subprocesses need a child watcher, which the policy of uvloop (set by Ray) does not have.
        runner.process = subprocess.Popen(  # noqa: S603
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**self._environment, WORKER_ID: runner.worker_id},
        )
        assert runner.process.stdin is not None
        os.set_blocking(runner.process.stdin.fileno(), False)  # a frozen process does not read

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            if self._attempts_ended != self._store.attempts_ended:
                self._attempts_ended = self._store.attempts_ended
                for runner in self._runners:
                    runner.losses = 0
            for runner in self._runners:
                try:
                    await self._check(runner)
                except Exception:
                    _log.exception("%s could not be checked", runner.name)

    async def _check(self, runner: _Runner) -> None:
        assert runner.process is not None
        now = time.monotonic()
        if runner.end:
            if now >= runner.again_at and self._may_start(runner):
                await self._store.give_up(runner.worker_id)  # what its last request has taken
                try:
                    self._start(runner)
                except OSError as error:
                    await self._note_end(runner, f"{error.strerror} at its start")
        elif (status := runner.process.poll()) is not None:
            await self._note_end(runner, how_ended(status))
        elif not runner.has_begun:
            await self._check_start(runner, now - runner.started)

    async def _check_start(self, runner: _Runner, seconds: float) -> None:
        if await self._store.get_worker_by_id(runner.worker_id) is not None:
            runner.has_begun = self._any_begun = True
            if runner.starts > 1:
                _log.warning("%s takes rollouts again", runner.name)
        elif seconds > _START_S:
            self.end(runner.worker_id)
        elif seconds > _LATE_S and not runner.is_late:
            runner.is_late = True
            _log.warning("%s takes no rollouts yet, %g s after its start", runner.name, _LATE_S)

    async def _note_end(self, runner: _Runner, end: str) -> None:
        self.lost, runner.losses, runner.end = self.lost + 1, runner.losses + 1, end
        delay_s = min(_FIRST_DELAY_S * 2 ** (runner.losses - 1), _LAST_DELAY_S)
        runner.again_at = time.monotonic() + delay_s
        assert runner.process is not None
        _close_input(runner.process)
        if again := await self._store.give_up(runner.worker_id):
            self.notify()
        if self._may_start(runner):  # else it has said what is wrong
            _log.warning(
                "%s has ended, with %s: it is started again after %g s%s",
                runner.name,
                end,
                delay_s,
                f", and {again} rollouts of it are tried again now" if again else "",
            )

    def _may_start(self, runner: _Runner) -> bool:
        """Not if its input was wrong, as it would be again: unless a process with the same input runs."""
        return self._any_begun or runner.end != _REFUSED


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Let the guard end all that is below it. It may be frozen."""
    process.terminate()
    process.send_signal(signal.SIGCONT)


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


async def _running_still(processes: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Those that have not ended after a moment."""
    deadline = time.monotonic() + _STOP_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_CHECK_S / 10)  # a thread that waits may not start
    return [process for process in processes if process.poll() is None]


_REFUSED = how_ended(UserError.exit_code)
"""How a runner ends that has said what is wrong with its input."""
