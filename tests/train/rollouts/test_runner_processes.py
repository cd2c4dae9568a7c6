"""Runner processes run rollouts as the runners of the trainer do, and end with the run."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import job_of
from programs import run

from groundwire import domains
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.evaluator import try_tasks
from groundwire.train.rollouts.runner.pool import NOTIFIED_POLL_S
from groundwire.train.rollouts.runner_processes import RunnerProcesses
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.sqlite import MEMORY
from groundwire.train.verl.ray_job import environment


@pytest.mark.usefixtures("forked_python")
def test_runner_processes_run_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NotImplementedError  # as with uvloop's policy

    monkeypatch.setattr(asyncio, "get_child_watcher", none, raising=False)
    monkeypatch.setattr(asyncio.events, "get_child_watcher", none, raising=False)
    config = resolve("fast", runner_processes=2, n_runners=8, seed=1)
    domain = domains.get("spider")
    outcomes, _ = try_tasks(job_of(config, domain), run=RunDir(tmp_path), callback=ProgressCallback(), count=6)
    assert [ended.outcome.status for ended in outcomes] == ["succeeded"] * 6
    assert all(ended.calls for ended in outcomes)


class _CountingStore(LightningStore):
    """Counts how often runners look for rollouts."""

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self.looked, self.more = 0, asyncio.Event()

    async def dequeue(self, limit: int, worker_id: str | None = None) -> Any:
        self.looked += 1
        self.more.set()
        return await super().dequeue(limit, worker_id)

    async def looks(self, number: int) -> None:
        while self.looked < number:
            self.more.clear()
            await self.more.wait()


@pytest.mark.usefixtures("forked_python")
async def test_processes_look_for_rollouts_when_they_are_told() -> None:
    store, rounds = _CountingStore(), 40
    processes = RunnerProcesses(store, resolve("fast", runner_processes=2, n_runners=2))

    async def tell() -> None:
        for number in range(rounds):
            processes.notify()
            processes.notify()  # one line tells of both
            await store.looks(2 * (number + 2))

    await processes.start()
    try:
        await store.looks(2)  # each once at its start
        began = time.monotonic()
        await asyncio.wait_for(tell(), rounds * NOTIFIED_POLL_S)  # without lines each round would be a poll
        polls = 2 * (time.monotonic() - began) / NOTIFIED_POLL_S
        assert store.looked < 3 * rounds + polls
    finally:
        await processes.stop()


@pytest.mark.usefixtures("forked_python")
async def test_the_end_of_all_processes_is_reported() -> None:
    processes = RunnerProcesses(LightningStore(MEMORY), resolve("fast", runner_processes=2, n_runners=2))
    await processes.start()
    one, other = processes._processes
    assert processes.failure() == ""
    one.kill()
    await asyncio.to_thread(one.wait)
    assert processes.failure() == ""
    other.kill()
    await asyncio.to_thread(other.wait)
    assert processes.failure() == "all 2 runner processes have ended, with status -9: nothing runs agents any more"
    await processes.stop()


async def test_another_environment_has_its_commands_first_and_the_users_import_path_from_verl_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/my/modules")
    for name, value in environment("RUN", ()).items():  # of Ray's processes, which import the trainer's packages
        monkeypatch.setenv(name, value)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf %s "$PYTHONPATH $PATH" > {tmp_path}/path\n')
    python.chmod(0o755)
    processes = RunnerProcesses(LightningStore(MEMORY), resolve("fast", runner_python=str(python)))
    await processes.start()
    await asyncio.to_thread(processes._processes[0].wait)
    await processes.stop()
    assert (tmp_path / "path").read_text() == f"/my/modules {tmp_path}:{os.environ['PATH']}"


def test_what_a_runner_process_says_of_its_agent_is_the_only_error(tmp_path: Path) -> None:
    # It can be imported where the run is checked, and not in the runner process.
    agent = "import os\nif os.environ['OMP_NUM_THREADS'] == '1':\n    import a_missing_package\ndef f(question): ...\n"
    (tmp_path / "late.py").write_text(agent)
    arguments = ("--agent", f"{tmp_path}/late.py:f", "--runner-python", sys.executable, "--dev")
    done = run("-m", "train.run", *arguments, environment={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    assert "late.py needs the package 'a_missing_package', which is not installed here" in done.stderr
