"""Runner processes run rollouts as the runners of the trainer do, and end with the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import external_processes
import pytest
from external_processes import DEADLINE_S, jobs
from fork_server import Forked
from jobs import job_of
from programs import Program, children, is_running, run, until, wait_for

from groundwire import domains
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.train.api import training
from groundwire.train.api.training import make_job
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.evaluator import try_tasks
from groundwire.train.rollouts import runner_processes
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.errors import RunnersEndedError
from groundwire.train.rollouts.runner.pool import NOTIFIED_POLL_S
from groundwire.train.rollouts.runner_processes import RunnerProcesses
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.sqlite import MEMORY
from groundwire.train.verl.ray_job import environment

GOLD = "SELECT name FROM singer"


@pytest.mark.parametrize(
    ("given", "cores", "expected"),
    [
        ({}, 2, 1),
        ({"backend": "mcp"}, 8, 1),
        ({}, 1, None),
        ({"runner_processes": 0}, 2, 0),
        ({"runner_processes": 3}, 2, 3),
        ({"tasks_per_step": 4, "group_size": 8}, 2, None),
        ({"backend": "custom", "agent": "dev.gpu.agents:once"}, 2, None),
        ({"external_store_address": "http://127.0.0.1:9", "n_runners": 0}, 2, None),
    ],
    ids=str,
)
def test_a_bundled_agent_of_a_large_run_has_a_process_beside_the_local_trainer(
    given: dict[str, Any], cores: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "processors", lambda: cores)
    run = {"trainer": "local", "tasks_per_step": 8, "group_size": 8, **given}
    assert make_job(run).config.runner_processes == expected
    assert make_job(run, dev=True).config.runner_processes == given.get("runner_processes")


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


@asynccontextmanager
async def _supervised(
    *, replies: Any = GOLD, unresponsive_s: float | None = None, **settings: Any
) -> AsyncIterator[Any]:
    """Runner processes of an agent of one call, with a collector and a policy; each runs one rollout at once."""
    config = resolve(
        "fast",
        **{
            "backend": "custom",
            "agent": f"{external_processes.__file__}:ask",
            "runner_processes": 2,
            "n_runners": 2,
            **settings,
        },
    )
    store = LightningStore(MEMORY)
    async with (
        ScriptedPolicyServer(replies=replies) as policy,
        LLMProxy(upstreams=[policy.base_url], sink=store) as proxy,
    ):
        processes = RunnerProcesses(store, config)
        collector = RolloutCollector(
            store=store,
            proxy=proxy,
            model=policy.model,
            notify_runners=processes.notify,
            runner_failure=processes.failure,
            settings=config.for_agents(),
        )
        await processes.start()
        yield processes, collector, policy
        await processes.stop()


async def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def _first_hangs() -> Callable[[Any], Any]:
    replies = iter([Reply(text=GOLD, delay_s=DEADLINE_S)])
    return lambda _: next(replies, GOLD)


def _task(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "db.sqlite"
    with closing(sqlite3.connect(path)) as conn:
        conn.executescript("CREATE TABLE singer (name text); INSERT INTO singer VALUES ('Ann');")
    return {"id": "t1", "question": "Which singers?", "query": GOLD, "db_path": str(path)}


def _freeze(process: Any) -> None:
    for pid in (process.pid, *children(process.pid)):
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("how", "end"),
    [
        (lambda process: os.kill(process.pid, signal.SIGKILL), "signal SIGKILL"),  # the guard
        (lambda process: os.kill(children(process.pid)[0], signal.SIGKILL), "signal SIGKILL"),
        (lambda process: os.kill(children(process.pid)[0], signal.SIGTERM), "status 0"),
        (_freeze, "status 0"),
    ],
    ids=["guard killed", "killed", "stopped", "frozen"],
)
async def test_a_runner_process_that_ends_is_started_again_and_its_rollout_goes_to_another_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: Callable[[Any], None], end: str
) -> None:
    settings = {"data_dir": str(tmp_path), "rollout_process": "off"}
    async with _supervised(replies=_first_hangs(), **settings) as (processes, collector, policy):
        await _until(lambda: all(runner.has_begun for runner in processes._runners))
        batch = asyncio.create_task(collector.run(jobs(_task(tmp_path), 1), deadline_s=DEADLINE_S))
        await _until(lambda: policy.requests)
        [rollout_id] = await processes._store.unfinished("rs-run")
        holder_id = (await processes._store.get(rollout_id)).attempts[-1].worker_id
        [holder] = [runner for runner in processes._runners if runner.worker_id == holder_id]
        how(holder.process)
        if how is _freeze:
            processes.end(holder_id)
        [ended] = await batch
        assert (ended.outcome.status, ended.outcome.reward, ended.attempt.number) == ("succeeded", 1.0, 2)
        assert ended.attempt.worker_id != holder_id
        await _until(lambda: holder.has_begun and holder.starts == 2)
    said = f"{holder.name} has ended, with {end}: it is started again after 0.5 s"
    assert [line.partition(",")[0] for line in caplog.messages if "does not answer" not in line] == [
        said.partition(",")[0],
        f"{holder.name} takes rollouts again",
    ]
    assert said in caplog.text
    assert processes.lost == 1


async def test_a_run_whose_runner_processes_end_again_and_again_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_processes, "_FIRST_DELAY_S", 0.01)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    async with _supervised(runner_python=str(python), data_dir=str(tmp_path)) as (processes, collector, _):
        reason = (
            r"all 2 runner processes have ended again and again, (\d+) times without a rollout that ended, the last "
            "time with status 3: see what they printed, and whether the machine has memory for them"
        )
        with pytest.raises(RunnersEndedError, match=reason):
            await collector.run(jobs({"id": "t"}, 1), deadline_s=DEADLINE_S)
        assert all(runner.losses >= runner_processes._MOST_LOSSES for runner in processes._runners)


async def test_losses_between_rollouts_that_end_do_not_end_a_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 600\n")
    python.chmod(0o755)
    async with _supervised(runner_python=str(python), runner_processes=1, data_dir=str(tmp_path)) as (processes, *_):
        [runner], store = processes._runners, processes._store
        for losses in (1, 2, 1):
            if losses == 1:
                await store.enqueue(jobs({"id": "t"}, 1))
                [rollout] = await store.dequeue(1, "a worker")
                await store.end_attempt(rollout.rollout_id, rollout.attempts[-1].attempt_id, None, failed=True)
                await _until(lambda: not runner.losses)
            await _until(lambda: not runner.end)
            os.kill(runner.process.pid, signal.SIGKILL)
            await _until(lambda: runner.end)
            assert (runner.losses, processes.failure()) == (losses, "")


def test_a_run_goes_on_without_a_killed_runner_process_and_counts_it(tmp_path: Path) -> None:
    settings = ("--val-tasks", "1", "tasks_per_step=2", "group_size=2", "val_every=0", "--runner-processes", "2")
    program = Program("-m", "train.run", "--steps", "1", *settings, "--output-dir", str(tmp_path))
    until(lambda: any(file.stat().st_size for file in tmp_path.glob("2*/metrics.jsonl")), program)  # a validation
    [runner, _] = [pid for pid in children(program.pid) if b"train.runner" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(runner, signal.SIGKILL)
    done = program.wait(DEADLINE_S)
    assert done.returncode == int("nothing was trained" in done.stdout), done.stderr
    assert "of 2 has ended, with signal SIGKILL: it is started again after 0.5 s" in done.stderr
    [folder] = tmp_path.glob("2*")
    assert json.loads((folder / "summary.json").read_text())["runners_lost"] == 1
    assert RunDir.open(folder).metrics()[1]["failures"] == {}


@pytest.mark.parametrize("rollout_process", ["fork", "spawn", "off"])
def test_runner_processes_and_all_that_their_agents_started_end_with_a_killed_trainer(
    tmp_path: Path, rollout_process: str
) -> None:
    settings = {"data_dir": str(tmp_path), "rollout_process": rollout_process}
    trainer = Forked(_hanging_trainer, str(tmp_path), settings)
    try:
        wait_for((tmp_path / "started").exists, DEADLINE_S)
        family = _descendants(trainer.pid)
        started = int((tmp_path / "started").read_text())
        assert started in family
    finally:
        trainer.kill()
    wait_for(lambda: not any(map(is_running, family)), DEADLINE_S)


def _hanging_trainer(folder: str, settings: dict[str, Any]) -> None:
    """A trainer whose one rollout does not end."""

    async def train() -> None:
        agent = f"{external_processes.__file__}:start_a_process"
        async with _supervised(agent=agent, **settings) as (_, collector, _):
            task = {**_task(Path(folder)), "started": f"{folder}/started"}
            await collector.run(jobs(task, 1), deadline_s=DEADLINE_S)

    asyncio.run(train())


def _descendants(pid: int) -> set[int]:
    found = set[int]()
    for child in children(pid):
        found |= {child} | _descendants(child)
    return found


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
    await asyncio.to_thread(processes._runners[0].process.wait)  # type: ignore[union-attr]
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
