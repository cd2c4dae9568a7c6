"""Trainer, store and runners are separate processes and may die; no rollout is lost, and none counts as zero."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import external_processes as processes
import pytest
from agentlightning.store.client_server import LightningStoreClient
from fork_server import Forked
from programs import Program, run, until

from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.domains import Task
from groundwire.tools.errors import CommandError
from groundwire.tools.http.access_token import access_token
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.job.prepare import check_store_settings
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.store.errors import StoreAddressError
from groundwire.train.store.health import check_store
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import Rollout

GOLD = "SELECT name FROM singer"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    path = tmp_path / "db.sqlite"
    with sqlite3.connect(path) as conn:
        conn.executescript("CREATE TABLE singer (id int, name text); INSERT INTO singer VALUES (1, 'Ann');")
    conn.close()
    return {"id": "t1", "question": "Which singers?", "query": GOLD, "db_path": str(path)}


class _Pieces:
    """The processes of one test."""

    def __init__(self, folder: Path) -> None:
        self.port = processes.free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.folder, self.path = str(folder), str(folder / "store.db")
        self.all: list[Any] = []

    def start(self, target: Any, *arguments: Any) -> Any:
        self.all.append(Forked(target, *arguments))
        return self.all[-1]

    def store(self) -> Any:
        process = self.start(processes.store, self.path, self.port)
        processes.wait_for_store(self.address, process)
        return process

    def runner(self, n_runners: int = 4, backend: str = "custom", agent: str = processes.AGENT) -> Any:
        data_dir = self.folder if backend == "custom" else None  # those of custom have the task's database in it
        return self.start(processes.runner, self.address, n_runners, backend, agent, data_dir)


@pytest.fixture
def pieces(tmp_path: Path) -> Iterator[_Pieces]:
    pieces = _Pieces(tmp_path)
    yield pieces
    for process in pieces.all:
        process.kill()
        process.join()


@asynccontextmanager
async def _trainer(
    pieces: _Pieces, policy: ScriptedPolicyServer, unresponsive_s: float | None = None
) -> AsyncIterator[tuple[RolloutCollector, RemoteStore]]:
    client = RemoteStore(pieces.address)
    await client.start()
    async with LLMProxy(upstreams=[policy.base_url], sink=client) as proxy:
        yield (
            RolloutCollector(
                store=client,
                proxy=proxy,
                model=policy.model,
                settings=processes.SETTINGS,
                unresponsive_s=unresponsive_s,
                poll_s=0.1,
            ),
            client,
        )
    await client.stop()


def _first_hangs() -> Any:
    """The first request is answered after all timeouts, all others at once."""
    replies = iter([Reply(text=GOLD, delay_s=300)])
    return lambda _: next(replies, GOLD)


async def _until(condition: Any) -> None:
    deadline = time.monotonic() + processes.DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def _results(outcomes: list[Rollout]) -> list[tuple[str, float | None]]:
    return [(ended.outcome.status, ended.outcome.reward) for ended in outcomes]


async def _holder(client: RemoteStore, runners: list[Any]) -> Any:
    """The runner that works on the one rollout."""
    [running] = await client.unfinished("rs-run")
    rollout = await client.get(running)
    assert rollout is not None
    pid = int(rollout.attempts[-1].worker_id.split("-")[-1])  # type: ignore[union-attr]
    return next(runner for runner in runners if runner.pid == pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_rollout_of_a_dead_runner_is_given_to_another(pieces: _Pieces, task: Task, how: int) -> None:
    pieces.store()
    runners = [pieces.runner(1), pieces.runner(1)]
    async with (
        ScriptedPolicyServer(replies=_first_hangs()) as policy,
        # A killed runner becomes unresponsive; a stopped one returns its rollouts at once.
        _trainer(pieces, policy, 2.0 if how == signal.SIGKILL else None) as (collector, client),
    ):
        batch = asyncio.create_task(collector.run(processes.jobs(task, 1), deadline_s=processes.DEADLINE_S))
        await _until(lambda: policy.requests)
        holder = await _holder(client, runners)
        os.kill(holder.pid, how)
        [ended] = await batch
        assert (ended.outcome.status, ended.outcome.reward, ended.attempt.number) == ("succeeded", 1.0, 2)
        assert [call.response_ids[-1] for call in ended.calls] == [256]


async def test_a_runner_with_a_blocking_agent_ends_on_sigterm(pieces: _Pieces, task: Task) -> None:
    pieces.store()
    runner = pieces.runner(agent="external_processes:block")
    async with ScriptedPolicyServer(replies=lambda _: GOLD) as policy, _trainer(pieces, policy) as (collector, _):
        batch = asyncio.create_task(collector.run(processes.jobs(task, 1), deadline_s=processes.DEADLINE_S))
        await _until(lambda: policy.requests)
        os.kill(runner.pid, signal.SIGTERM)
        await asyncio.to_thread(runner.join, processes.DEADLINE_S)
        assert runner.exitcode == 0
        batch.cancel()


async def test_agents_and_their_processes_do_not_get_the_token(
    pieces: _Pieces, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUNDWIRE_TOKEN", "a-token-that-only-the-runner-has")
    pieces.store()
    pieces.runner(1, agent="external_processes:show_token")
    async with ScriptedPolicyServer(replies=lambda _: GOLD) as policy, _trainer(pieces, policy) as (collector, _):
        [ended] = await collector.run(processes.jobs(task, 1), deadline_s=processes.DEADLINE_S)
    assert "token=." in ended.outcome.message


async def test_a_slow_runner_keeps_its_rollout(pieces: _Pieces, task: Task) -> None:
    pieces.store()
    pieces.runner()
    async with (
        ScriptedPolicyServer(replies=[Reply(text=GOLD, delay_s=3)]) as policy,
        _trainer(pieces, policy, unresponsive_s=2.0) as (collector, _),
    ):
        [ended] = await collector.run(processes.jobs(task, 1), deadline_s=processes.DEADLINE_S)
    assert (ended.outcome.status, ended.outcome.reward, ended.attempt.number) == ("succeeded", 1.0, 1)


async def test_no_rollout_is_lost_when_the_store_is_killed_and_restarted(pieces: _Pieces, task: Task) -> None:
    store = pieces.store()
    pieces.runner(2)
    async with (
        ScriptedPolicyServer(replies=lambda _: Reply(text=GOLD, delay_s=0.2)) as policy,
        _trainer(pieces, policy, unresponsive_s=2.0) as (collector, _),
    ):
        batch = asyncio.create_task(collector.run(processes.jobs(task, 12), deadline_s=processes.DEADLINE_S))
        await _until(lambda: len(policy.requests) >= 4)
        os.kill(store.pid, signal.SIGKILL)
        store.join()
        await asyncio.sleep(0.5)
        pieces.start(processes.store, pieces.path, pieces.port)
        outcomes = await batch
    assert _results(outcomes) == [("succeeded", 1.0)] * 12
    assert all(len(ended.calls) == 1 for ended in outcomes)


async def test_a_restarted_trainer_continues_with_the_same_runners(pieces: _Pieces, task: Task, tmp_path: Path) -> None:
    pieces.store()
    pieces.runner(agent="own_agents:blocking")  # its client knows no address
    result = tmp_path / "result"
    async with ScriptedPolicyServer(replies=lambda _: Reply(text=GOLD, delay_s=300)) as policy:
        first = pieces.start(processes.trainer, pieces.address, policy.base_url, task, 6, str(result))
        await _until(lambda: policy.requests)
        os.kill(first.pid, signal.SIGKILL)
    async with ScriptedPolicyServer(replies=lambda _: GOLD) as policy:
        # Its proxy has another address; the rollouts that the first one left are cancelled.
        second = pieces.start(processes.trainer, pieces.address, policy.base_url, task, 6, str(result))
        await asyncio.to_thread(second.join, processes.DEADLINE_S)
        assert json.loads(result.read_text()) == [["succeeded", 1.0]] * 6
        assert len(policy.requests) >= 6
    client = RemoteStore(pieces.address)
    await client.start()
    assert not await client.unfinished("rs-a-run")
    await client.stop()


async def test_agent_lightnings_own_store_works_too(pieces: _Pieces, task: Task) -> None:
    store = pieces.start(processes.their_store, pieces.port)
    await asyncio.to_thread(processes.wait_for_store, pieces.address, store)
    pieces.runner()
    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as policy,
        _trainer(pieces, policy, unresponsive_s=10.0) as (collector, client),
    ):
        assert (
            _results(await collector.run(processes.jobs(task, 5), deadline_s=processes.DEADLINE_S))
            == [("succeeded", 1.0)] * 5
        )
        with pytest.raises(ValueError, match=r"nothing.* not found"):
            await client.end_attempt("nothing", "latest", None, failed=True)


async def test_agent_lightnings_own_runner_works_too(pieces: _Pieces, task: Task) -> None:
    pieces.store()
    pieces.start(processes.their_runner, pieces.address)
    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as policy,
        _trainer(pieces, policy, unresponsive_s=10.0) as (collector, _),
    ):
        results = await collector.run(processes.jobs(task, 3), deadline_s=processes.DEADLINE_S)
    assert _results(results) == [("succeeded", 1.0)] * 3


async def test_a_runner_of_another_backend_reports_a_failure_not_zero(pieces: _Pieces, task: Task) -> None:
    pieces.store()
    pieces.runner()
    settings = {**processes.SETTINGS, "backend": "langgraph"}
    async with (
        ScriptedPolicyServer(replies=lambda _: GOLD) as policy,
        _trainer(pieces, policy) as (collector, _),
    ):
        collector._settings = settings
        [ended] = await collector.run(processes.jobs(task, 1), deadline_s=processes.DEADLINE_S)
    assert (ended.outcome.status, ended.outcome.reward) == ("refused", None)
    assert ended.outcome.message == (
        "this runner's backend is 'custom', and the rollout's is 'langgraph': start groundwire run and "
        "groundwire runner with the same --backend"
    )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:4747", "'127.0.0.1:4747' is not like http://HOST:PORT"),
        ("http://127.0.0.1:port", "is not like http://HOST:PORT"),
        ("http://127.0.0.1:1", r"no store answers at http://127.0.0.1:1 \(connection refused\)"),
        ("http://no.such.host.invalid:1", "no store answers at http://no.such.host.invalid:1"),
    ],
)
def test_a_wrong_address_is_reported_in_one_line(address: str, message: str) -> None:
    with pytest.raises(StoreAddressError, match=message) as caught:
        check_store(address, timeout_s=0.2)
    assert "\n" not in str(caught.value)


def test_a_store_may_start_after_trainer_and_runners(pieces: _Pieces) -> None:
    lines: list[str] = []

    def start(line: str) -> None:
        lines.append(line)
        pieces.start(processes.store, pieces.path, pieces.port)

    assert check_store(pieces.address, timeout_s=60, on_wait=start)["status"] == "ok"
    assert lines == [f"waiting up to 60 s for the store at {pieces.address} (connection refused)"]


def test_a_runner_waits_as_long_as_it_is_told() -> None:
    module = "groundwire.train.runner"
    done = run("-m", module, "--external-store-address", "http://127.0.0.1:1", "--store-wait-s", "1.2")
    assert done.returncode == 2
    progress, error = done.stderr.splitlines()
    assert progress == "waiting up to 1.2 s for the store at http://127.0.0.1:1 (connection refused)"
    assert error.startswith("error: no store answers at http://127.0.0.1:1 (connection refused)")


async def _serving(answer: Any) -> Any:
    from aiohttp import web

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def _answering(routes: dict[str, Any]) -> Any:
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        if request.path not in routes:
            raise web.HTTPNotFound
        return web.json_response(routes[request.path])

    return await _serving(answer)


async def test_a_runner_whose_store_restarts_between_its_checks_waits_for_it() -> None:
    from aiohttp import web

    requests, is_away = list[str](), False

    async def answer(request: web.Request) -> web.Response:
        nonlocal is_away
        requests.append(request.path)
        is_away = is_away or len(requests) == 3  # the first check asks twice
        replies = {"/v1/agl/health": {"status": "ok"}, "/v1/agl/queues/rollouts/dequeue": list[Any]()}
        return web.Response(status=503) if is_away else web.json_response(replies[request.path])

    server = await _serving(answer)
    address = f"http://127.0.0.1:{server.addresses[0][1]}"
    runner = Program("-m", "train.runner", "--external-store-address", address)
    try:
        await asyncio.to_thread(until, lambda: "for the store at" in runner.stderr_so_far(), runner)
        is_away, requests[:] = False, ["", "", ""]
        await asyncio.to_thread(until, lambda: "16 langgraph agents for" in runner.stdout_so_far(), runner)
        runner.send_signal(signal.SIGTERM)
        assert (await asyncio.to_thread(runner.wait, processes.DEADLINE_S)).returncode == 0
    finally:
        await server.cleanup()


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({}, "is not a Lightning store: status 404 "),
        ({"/v1/agl/health": {"status": "starting"}}, "is not a Lightning store: status 200 "),
        ({"/v1/agl/health": {"status": "ok"}}, "does not have the API of agentlightning 0.3: status 404"),
        (
            {"/v1/agl/health": {"status": "ok"}, "/v1/agl/queues/rollouts/dequeue": None},
            "does not have the API of agentlightning 0.3",
        ),
    ],
)
async def test_a_server_that_is_no_store_or_of_another_version_is_reported(
    routes: dict[str, Any], message: str
) -> None:
    server = await _answering(routes)
    try:
        with pytest.raises(StoreAddressError, match=message):
            await asyncio.to_thread(check_store, f"http://127.0.0.1:{server.addresses[0][1]}", timeout_s=2.0)
    finally:
        await server.cleanup()


@pytest.mark.parametrize(
    ("value", "address", "message"),
    [
        ("0", None, "AGL_MANAGED_STORE=0 asks for an external store: give --external-store-address"),
        ("1", "http://127.0.0.1:1", "AGL_MANAGED_STORE=1 asks for a store in the trainer"),
        ("maybe", None, "AGL_MANAGED_STORE is 'maybe'; it is one of"),
    ],
)
def test_agent_lightnings_variable_is_understood(
    monkeypatch: pytest.MonkeyPatch, value: str, address: str | None, message: str
) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", value)
    with pytest.raises(CommandError, match=message):
        check_store_settings(address)


@pytest.mark.parametrize("module", ["groundwire.train.run", "groundwire.train.runner"])
def test_trainer_and_runner_stop_at_a_wrong_address(module: str) -> None:
    done = run("-m", module, "--external-store-address", "localhost:1")
    assert done.returncode == 2
    assert done.stderr == "error: the store's address 'localhost:1' is not like http://HOST:PORT\n"


async def test_a_run_trains_through_the_store(pieces: _Pieces) -> None:
    pieces.store()
    done = await asyncio.to_thread(
        run,
        *(
            "-m",
            "train.run",
            "--dev",
            "--llm-proxy",
            "--agent-option",
            "max_turns=1",
            "--external-store-address",
            pieces.address,
        ),
        environment={**os.environ, "AGL_MANAGED_STORE": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert "10 rollouts" in done.stdout
    client = LightningStoreClient(pieces.address.replace("://", f"://x:{access_token()}@"))
    rollouts = await client.query_rollouts()
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 50  # four more of each task, for its pass rate
    assert [span.name for span in await client.query_spans(rollouts[0].rollout_id)][-1] == "agentlightning.annotation"
    await client.close()


async def test_a_run_whose_runners_have_another_reward_ends_with_both_names(pieces: _Pieces, tmp_path: Path) -> None:
    pieces.store()
    pieces.runner(backend="langgraph")
    config = resolve(
        "fast",
        external_store_address=pieces.address,
        reward="spider_test_suite",
        n_runners=0,
        steps=1,
        val_tasks=2,
        agent_options={"max_turns": 1},
    )
    folder = RunDir.create(str(tmp_path), backend="langgraph", domain="spider", config=config.to_dict()).path
    done = await asyncio.to_thread(run, "-m", "train.run", "--resume", str(folder))
    assert done.returncode == 1
    assert "--domain spider --reward spider_test_suite" in done.stdout
    assert "none of 2 validation rollouts could be judged; the first failed of refused: " in done.stderr
    assert "this runner's reward is 'spider_exec_match', and the rollout's is 'spider_test_suite'" in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_run_that_is_killed_is_resumed_against_the_same_store(pieces: _Pieces, tmp_path: Path) -> None:
    pieces.store()
    pieces.runner(backend="langgraph")  # it runs all the time, and gets the second trainer's address from the store
    config = resolve(
        "fast",
        external_store_address=pieces.address,
        steps=2,
        tasks_per_step=2,
        group_size=2,
        n_runners=0,
        val_tasks=1,
        agent_options={"max_turns": 1},
    )
    folder = RunDir.create(str(tmp_path), backend="langgraph", domain="spider", config=config.to_dict()).path
    program = Program("-m", "train.run", "--resume", str(folder))
    await asyncio.to_thread(until, (folder / "checkpoints" / "step-00001").exists, program)
    program.send_signal(signal.SIGKILL)
    assert program.wait(600).returncode == -signal.SIGKILL
    done = await asyncio.to_thread(run, "-m", "train.run", "--resume", str(folder))
    assert done.returncode == int("nothing was trained" in done.stdout), done.stderr
    lines = RunDir.open(folder).metrics()
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [(line["rollouts"], line["failures"]) for line in lines[1:]] == [(4, {})] * 2
    client = RemoteStore(pieces.address)
    await client.start()
    assert not await client.unfinished(RunDir.open(folder).resources_id)
    await client.stop()
