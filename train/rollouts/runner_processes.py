"""Runners in several processes.

Hundreds of agents are more work than one Python interpreter can do: :class:`RunnerProcesses` starts ``python -m
train.runner`` on the run's store, which is served to the processes on the loopback interface. A line on their standard
input tells them that there are rollouts. They end when it ends, so with this process, however it ends. With the setting
``runner_python`` they run with the interpreter of the agent's own environment, which needs no package of the trainer's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from groundwire.tools.http.access_token import VARIABLE
from groundwire.tools.startup import USERS_PYTHON_PATH, activated, child_python_path
from groundwire.train.config.run_config import RunConfig
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.server import bind, serve

_STOP_S = 5.0


class RunnerProcesses:
    """``config.runner_processes`` processes, which together run ``config.n_runners`` rollouts at once.

    ``bundled`` is the folder of the domain's bundled data: another environment has a copy at another path.
    """

    def __init__(self, store: LightningStore, config: RunConfig, *, bundled: Path | None = None) -> None:
        self._config = config
        if config.runner_python and config.data_dir is None and bundled is not None:
            self._config = config.model_copy(update={"data_dir": str(bundled)})
        self._token = secrets.token_urlsafe(32)
        self._server = serve(store, bind("127.0.0.1", 0), token=self._token)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._notifying = False

    async def start(self) -> None:
        """Serve the store and start the processes; they take rollouts as soon as they are ready."""
        address, config = await self._server.__aenter__(), self._config
        runners_each = -(-config.n_runners // config.runner_processes)
        python = config.runner_python or sys.executable
        command = [python, "-m", "groundwire.train.runner", "--until-eof"]
        command += ["--external-store-address", address, "--n-runners", str(runners_each), *config.runner_options()]
        # The GPUs are for the trainer, and each runner gets one CPU thread.
        settings = {VARIABLE: self._token, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if config.runner_python is None:
            settings["PYTHONPATH"] = child_python_path()
        elif (users := os.environ.get(USERS_PYTHON_PATH)) is not None:  # another environment has its own packages
            settings["PYTHONPATH"] = users
        for _ in range(config.runner_processes):
            # asyncio's own subprocesses need a child watcher, which the policy of uvloop (set by Ray) does not have.
            process = subprocess.Popen(  # noqa: ASYNC220, S603
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**activated(python), **settings}
            )
            self._processes.append(process)

    def notify(self) -> None:
        """Rollouts have been enqueued: the processes take them now instead of at the next poll."""
        if not self._notifying:  # once for all that this turn of the event loop enqueues
            self._notifying = True
            asyncio.get_running_loop().call_soon(self._write_lines)

    def _write_lines(self) -> None:
        self._notifying = False
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                with suppress(BrokenPipeError):  # the process has ended
                    os.write(process.stdin.fileno(), b"\n")

    def failure(self) -> str:
        """A message if all processes have ended, which none should; "" as long as one is running."""
        codes = [process.poll() for process in self._processes]
        if None in codes:
            return ""
        statuses = ", ".join(sorted({str(code) for code in codes}))
        ended = f"all {len(codes)} runner processes have ended" if len(codes) > 1 else "the runner process has ended"
        return f"{ended}, with status {statuses}: nothing runs agents any more"

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
