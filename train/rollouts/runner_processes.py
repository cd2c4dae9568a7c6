"""Runners in processes of their own: hundreds of agents are more work than one Python interpreter can do.

The processes are ``python -m train.runner`` on the run's store, which is served to them on the loopback interface. They
end when their standard input ends, so with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from agentlightning.store.base import LightningStore

from groundwire.tools.paths import IMPORT_PATH
from groundwire.train.config.run_config import RunConfig
from groundwire.train.store.server import bind, serve

__all__ = ["RunnerProcesses"]

_STOP_S = 5.0


class RunnerProcesses:
    """``config.runner_processes`` processes that run ``config.n_runners`` rollouts at once between them."""

    def __init__(self, store: LightningStore, config: RunConfig) -> None:
        self._config = config
        self._server = serve(store, bind("127.0.0.1", 0))
        self._processes: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        """Serve the store and start the processes; they take rollouts as soon as they are ready."""
        address, config = await self._server.__aenter__(), self._config
        runners_each = -(-config.n_runners // config.runner_processes)
        command = [sys.executable, "-m", "groundwire.train.runner", "--until-eof", "--external-store-address", address]
        command += ["--backend", config.backend, "--domain", config.domain, "--n-runners", str(runners_each)]
        if config.agent is not None:
            command += ["--agent", config.agent]
        path = filter(None, [str(IMPORT_PATH), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        # The GPUs are for the trainer, and each runner gets one CPU thread.
        settings = {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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
