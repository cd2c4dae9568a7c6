"""Runners of this run in processes of their own: a few hundred agents at once are more than one interpreter's work.

They are ``python -m train.runner`` on the run's own store, which is served on the loopback interface for them. They end
with this process, however it ends: their standard input does.
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

_FAREWELL_S = 5.0


class RunnerProcesses:
    """``config.runner_processes`` processes with ``config.n_runners`` runners between them."""

    def __init__(self, store: LightningStore, config: RunConfig) -> None:
        self._config = config
        self._server = serve(store, bind("127.0.0.1", 0))
        self._processes: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        """Serve the store and start the processes; they take rollouts as soon as they are up."""
        address = await self._server.__aenter__()
        config = self._config
        each = -(-config.n_runners // config.runner_processes)
        command = [sys.executable, "-m", "groundwire.train.runner", "--until-eof", "--external-store-address", address]
        command += ["--backend", config.backend, "--domain", config.domain, "--n-runners", str(each)]
        if config.agent is not None:
            command += ["--agent", config.agent]
        path = os.pathsep.join(
            dict.fromkeys([str(IMPORT_PATH), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
        )
        # Agents have no business on a GPU, and one thread each is what there is for them.
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # Not asyncio's processes: they want the policy's child watcher, and uvloop's policy, which Ray sets, has none.
        for _ in range(config.runner_processes):
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)  # noqa: ASYNC220, S603
            )

    def ended(self) -> str:
        """What to say where not one of the processes is left, which should all be; "" as long as any is."""
        codes = [process.poll() for process in self._processes]
        if None in codes:
            return ""
        said = ", ".join(sorted({str(code) for code in codes}))
        return f"all {len(codes)} runner processes ended, with status {said}: nothing is left that runs agents"

    async def stop(self) -> None:
        """End the processes; what they were at is given back to the store."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        await asyncio.gather(*(asyncio.to_thread(_end, process) for process in self._processes))
        await self._server.__aexit__(None, None, None)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_FAREWELL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
