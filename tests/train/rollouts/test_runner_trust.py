"""A runner takes from the store only what may differ between rollouts; everything else is from its command line."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from judges import verdict
from programs import Program, run
from spider_folder import make_spider

from groundwire import domains
from groundwire.domains import database_folders, is_inside
from groundwire.domains.spider.loader import BUNDLED
from groundwire.domains.task_list import task_list
from groundwire.rewards import JudgeSettings
from groundwire.rewards.judge.settings import API_KEY
from groundwire.tools.http.access_token import access_token
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.job.job import Objects
from groundwire.train.job.prepare import prepare
from groundwire.train.rollouts.errors import RequestRefusedError
from groundwire.train.rollouts.outcome import final_outcome
from groundwire.train.rollouts.runner.agent import RemoteRolloutAgent
from groundwire.train.rollouts.runner.pool import RunnerPool
from groundwire.train.rollouts.runner.request_check import RequestCheck
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import ProxyLLM, Rollout
from groundwire.train.store.server import bind, serve
from groundwire.train.store.sqlite import MEMORY

GOLD = "SELECT name FROM singer"
STORE = "http://127.0.0.1:4747"


@pytest.fixture(scope="module")
def own_task() -> dict[str, Any]:
    return dict(domains.get("spider").load(None).train[0])


@pytest.fixture
def foreign_task(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "private.sqlite"
    with sqlite3.connect(path) as conn:
        conn.executescript("CREATE TABLE singer (id int, name text); INSERT INTO singer VALUES (1, 'SECRET');")
    conn.close()
    return {"id": "t1", "question": "Which singers?", "query": GOLD, "answer": "SECRET", "db_path": str(path)}


@asynccontextmanager
async def _model(reply: str = GOLD) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """A server that answers every request with a chat completion, and the requests it got."""
    requests: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append(request)
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(completion)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", requests
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _store() -> AsyncIterator[tuple[str, RemoteStore]]:
    """A store that is served over HTTP, and a client that may write to it."""
    async with serve(LightningStore(MEMORY), bind("127.0.0.1", 0), token=access_token()) as address:
        client = RemoteStore(address)
        await client.start()
        yield address, client
        await client.stop()


async def _result(
    client: RemoteStore, task: Any, policy_url: str, *, metadata: dict[str, Any] | None = None, **policy: Any
) -> Rollout:
    """Enqueue one rollout with this task, policy and metadata, and wait for its end."""
    await client.put_resources("rs", {"policy": ProxyLLM(endpoint=policy_url, model="m", **policy)})
    own: Any = metadata or {}
    rollout = Rollout(task=task, resources_id="rs", max_attempts=1, timeout_s=60, **own)
    await client.enqueue([rollout])
    for _ in range(600):
        if await client.ended([rollout.rollout_id]):
            break
        await asyncio.sleep(0.1)
    ended = await client.get(rollout.rollout_id)
    assert ended is not None
    ended.outcome = final_outcome(ended)
    return ended


def _check(**given: Any) -> RequestCheck:
    options: dict[str, Any] = {"data_dir": None, "policy_hosts": [], "store": STORE}
    options |= {name: given.pop(name) for name in options.keys() & given.keys()}
    settings = AgentSettings(**given)
    return RequestCheck.of(settings, domains.get(settings.domain), **options)


@asynccontextmanager
async def _runner(client: RemoteStore, **given: Any) -> AsyncIterator[None]:
    agent = RemoteRolloutAgent(_check(**given))
    runners = RunnerPool(store=client, agent=agent, n_runners=2, poll_s=0.05)
    await runners.start()
    try:
        yield
    finally:
        await runners.stop()
        await agent.stop()


async def test_a_foreign_rollout_gets_no_file_no_key_and_no_request(
    tmp_path: Path, foreign_task: dict[str, Any], own_task: dict[str, Any]
) -> None:
    cache = tmp_path / "made-by-the-attacker"
    async with _store() as (address, client), _model(verdict(1.0)) as (page, requests):
        judge = {"model": "m", "base_url": page, "cache": str(cache)}
        attacks: list[dict[str, Any]] = [
            {"settings": {"reward": "rule_judge_hybrid", "judge": judge}},
            {"settings": {"agent": "os:system"}},
            {},
        ]
        elsewhere = page.replace("127.0.0.1", "0.0.0.0")
        program = Program(
            *("-m", "train.runner", "--external-store-address", address),
            environment={**os.environ, API_KEY: "sk-the-users-key"},
        )
        try:
            results = [await _result(client, foreign_task, page, metadata=attack) for attack in attacks]
            results.append(await _result(client, own_task, elsewhere))
        finally:
            program.send_signal(15)
            done = await asyncio.to_thread(program.wait, 60)
    assert not requests
    assert not cache.exists()
    assert [(result.outcome.status, result.outcome.reward) for result in results] == [("refused", None)] * 4
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert f"'{foreign_task['db_path']}' is not in the data of this runner ({BUNDLED.resolve()})" in done.stderr
    assert "--policy-host 0.0.0.0" in done.stderr


async def test_a_runner_with_the_trainers_options_judges_with_its_own_address_key_and_cache(tmp_path: Path) -> None:
    task = dict(domains.get("medical").load(None).train[0])
    async with _store() as (address, client), _model() as (policy, _), _model(verdict(1.0)) as (url, asked):
        config = resolve(
            "fast",
            domain="medical",
            judge={"model": "m", "base_url": url, "deadline_s": 90.0},
            rollout_timeout_s=120.0,
            external_store_address=address,
            proxy_host="0.0.0.0",
        )
        cache = ("--judge", f"cache={tmp_path / 'judge.sqlite'}")
        program = Program(
            *("-m", "train.runner", "--external-store-address", address, *config.runner_options(), *cache),
            environment={**os.environ, API_KEY: "sk-the-users-key"},
        )
        try:
            settings = json.loads(json.dumps(config.for_agents()))  # as a store passes it on
            proxy = policy.replace("127.0.0.1", config.proxy_host)
            result = await _result(client, task, proxy, metadata={"settings": settings})
        finally:
            program.send_signal(15)
            done = await asyncio.to_thread(program.wait, 60)
    assert (result.outcome.status, result.outcome.message) == ("succeeded", "")
    assert result.outcome.reward_components["judge"] == 1.0
    assert {request.headers["Authorization"] for request in asked} == {"Bearer sk-the-users-key"}
    assert (tmp_path / "judge.sqlite").exists()
    assert f"reward: rule_judge_hybrid: answers are judged by m at {url}" in done.stdout


def test_a_runner_refuses_judge_options_of_no_use() -> None:
    done = run("-m", "train.runner", "--external-store-address", STORE, "--judge-model", "m")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: reward 'spider_exec_match' uses no judge: leave out the judge's options\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"reward": "spider_test_suite"},
            "this runner's reward is 'spider_exec_match', and the rollout's is 'spider_test_suite': start groundwire "
            "run and groundwire runner with the same --reward",
        ),
        ({"agent": "os:system"}, "this runner's agent is None, and the rollout's is 'os:system'"),
        (
            {"judge": {"base_url": "http://evil.example/v1"}},
            "this runner's judge base_url is None, and the rollout's is 'http://evil.example/v1': start groundwire "
            "run and groundwire runner with the same --judge-base-url",
        ),
        ({"judge": {"cache": "/tmp/x"}}, "with the same --judge cache=VALUE"),
        ({"judge": {"max_usd": 5.0}}, "this runner's judge max_usd is None, and the rollout's is 5.0"),
        ({"judge": {"key": 1}}, "the rollout's judge is {'key': 1}; it has model, base_url, "),
        ({"judge": "x"}, "the rollout's judge is 'x'"),
        ({"retries": 0}, "unknown setting 'retries'"),
        ("x", "the rollout's settings are 'x'; they must be a table"),
    ],
)
def test_settings_of_a_rollout_that_are_the_runners_own_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        _check().for_rollout(settings)
    assert message in str(refused.value)


def test_the_settings_of_a_trainer_with_the_same_options_are_accepted() -> None:
    judge = {"model": "m", "base_url": "http://h/v1", "samples": 3, "temperature": 0.5, "cache": "/on/the/trainer"}
    config = resolve("fast", reward="executes+rule_judge_hybrid", judge=judge, agent_options={"max_turns": 5})
    own = {**judge, "cache": "/on/the/runner"}
    check = _check(reward="executes+rule_judge_hybrid", judge=JudgeSettings(**own)).for_rollout(config.for_agents())
    assert (check.settings.agent_options["max_turns"], check.settings.judge.cache) == (5, "/on/the/runner")
    assert _check().for_rollout(resolve("fast").for_agents()).settings.reward == "spider_exec_match"
    shows = resolve("fast", agent_columns=["hardness", "db_id"])
    assert _check().for_rollout(shows.for_agents()).settings.agent_columns == "hardness,db_id"


def _endpoint(check: RequestCheck, endpoint: str) -> str:
    try:
        check._check_policy(endpoint)
    except RequestRefusedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://127.0.0.1:9/v1",
        "http://localhost:9/v1",
        "http://[::1]:9/v1",
        "http://10.0.0.5:9",
        "https://Host.example/",
    ],
)
def test_a_policy_of_this_machine_of_the_stores_and_of_a_given_host_is_allowed(endpoint: str) -> None:
    check = _check(policy_hosts=["host.example"], store="http://10.0.0.5:4747")
    assert _endpoint(check, endpoint) == ""


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://evil.example:9/v1",
        "http://127.0.0.1.evil.example/v1",
        "http://127.0.0.1@evil.example/v1",
        "http://127.0.0.1\\@evil.example/v1",
        "http://evil.example#@127.0.0.1/v1",
        "http://127.0.0.1/v1?x=",
        "http://2130706433/v1",
        "http://0.0.0.0:9/v1",
        "ftp://127.0.0.1/v1",
        "http://127.0.0.1/v1\n",
        "127.0.0.1/v1",
        "",
    ],
)
def test_any_other_host_or_address_is_refused(endpoint: str) -> None:
    assert _endpoint(_check(), endpoint)


@pytest.mark.parametrize("given", [{"extra_headers": {"Host": "x"}}, {"openai_proxy": "http://evil.example"}, "x"])
async def test_sampling_parameters_that_change_a_client_are_refused(own_task: dict[str, Any], given: Any) -> None:
    async with (
        _model() as (policy, requests),
        _store() as (_, client),
        _runner(client, backend="langgraph"),
    ):
        result = await _result(client, own_task, policy, metadata={"sampling": given})
        by_policy = await _result(client, own_task, policy, sampling_parameters={"openai_proxy": "http://e"})
    assert (result.outcome.status, by_policy.outcome.status) == ("refused", "refused")
    assert "a runner accepts frequency_penalty, max_completion_tokens" in result.outcome.message
    assert not requests


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"id": "t"}, "the task is no task of the domain spider: KeyError('question')"),
        ({"id": "t", "question": [], "db_path": ""}, "the task's question is []; it must be text"),
        ("x", "the task is no task of the domain spider"),
        ({"id": "t", "question": "?", "db_path": ["x"]}, "the task is no task of the domain spider"),
        ({"id": "t", "question": "?", "db_path": "\0"}, "is not in the data of this runner"),
    ],
)
async def test_a_task_of_another_form_fails_alone(own_task: dict[str, Any], task: Any, message: str) -> None:
    async with (
        _model() as (policy, _),
        _store() as (_, client),
        _runner(client),
    ):
        refused = await _result(client, task, policy)
        served = await _result(client, own_task, policy, metadata={"sampling": {"temperature": 0.5}})
    assert (refused.outcome.status, refused.outcome.reward) == ("refused", None)
    assert message in refused.outcome.message
    assert (served.outcome.status, served.outcome.reward) == ("succeeded", 0.0)


def _may_read(path: object, data_dir: Path | None = None, domain: str = "spider") -> bool:
    return is_inside(path, database_folders(domains.get(domain), data_dir and str(data_dir)))


def test_databases_are_read_in_the_data_folder_only(tmp_path: Path, own_task: dict[str, Any]) -> None:
    data, outside = tmp_path / "data", tmp_path / "private.sqlite"
    (data / "database").mkdir(parents=True)
    outside.touch()
    (data / "link.sqlite").symlink_to(outside)
    (data / "inside.sqlite").touch()
    assert _may_read(data / "inside.sqlite", data)
    for path in (outside, data / "link.sqlite", data / ".." / "private.sqlite", "/", f"{data}-2/x", b"x", 1, "\0"):
        assert not _may_read(path, data), path
    assert _may_read(data / "inside.sqlite", Path("/"))
    assert _may_read(own_task["db_path"])
    assert not _may_read(own_task["db_path"], data)


def test_the_folder_of_databases_may_be_a_link_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "database").symlink_to(tmp_path / "disk")
    assert _may_read(tmp_path / "disk" / "db" / "db.sqlite", tmp_path / "data")


def test_a_domain_without_a_folder_has_the_databases_of_its_data() -> None:
    [database] = {task["db_path"] for task in domains.get("medical").load(None).train}
    assert _may_read(database, domain="medical")
    assert not _may_read(Path(database).with_name("another.sqlite"), domain="medical")


def test_a_trainer_whose_runners_could_not_read_a_database_does_not_start(tmp_path: Path) -> None:
    folder = make_spider(tmp_path / "spider")
    cars = folder / "database" / "cars"
    cars.rename(tmp_path / "cars")
    cars.symlink_to(tmp_path / "cars")
    assert prepare(resolve("fast", data_dir=str(folder))).data.validation
    for runners in ({"runner_processes": 2}, {"external_store_address": STORE}):
        with pytest.raises(domains.DataError) as error:
            prepare(resolve("fast", data_dir=str(folder), **runners))
        assert f"1 of 2 databases are outside of the data's folder ({folder})" in str(error.value)
        assert f"such as {tmp_path / 'cars' / 'cars.sqlite'}: copy them into it" in str(error.value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [([{"price": math.nan}], "extra.0.price is nan, which is no number in JSON: use null, or leave it out"),
     (math.inf, "extra is inf"), ((1, [-math.inf]), "extra.1.0 is -inf"), (np.float32("nan"), "extra is nan")],
)  # fmt: skip
@pytest.mark.parametrize("runners", [{}, {"runner_processes": 2}, {"external_store_address": STORE}], ids=str)
def test_a_task_with_a_number_that_is_none_is_refused_wherever_it_runs(
    value: Any, problem: str, runners: dict[str, Any]
) -> None:
    tasks = task_list([{"question": f"{n}?", "id": f"t{n}", "extra": value if n == 4 else n} for n in range(10)])
    settings = {"backend": "command", "agent": "cat", "reward": "executes"}
    with pytest.raises(domains.DataError, match=f"^task 't4': {problem}"):
        prepare(resolve("fast", **settings, **runners), objects=Objects(domain=tasks, domain_is_named=True))


@pytest.mark.parametrize(
    ("value", "problem"), [(b"\xff", "invalid utf-8"), (object(), "Unable to serialize")], ids=["bytes", "object"]
)
def test_tasks_that_json_cannot_hold_are_refused_where_other_processes_run_them(value: Any, problem: str) -> None:
    tasks = task_list([{"question": f"{n}?", "id": f"t{n}", "extra": value} for n in range(10)])
    objects = Objects(domain=tasks, domain_is_named=True)
    settings = {"backend": "command", "agent": "cat", "reward": "executes"}
    for runners in ({"runner_processes": 2}, {"external_store_address": STORE}):
        with pytest.raises(domains.DataError, match=f"column 'extra': .*{problem}"):
            prepare(resolve("fast", **settings, **runners), objects=objects)


def _turns(count: int) -> dict[str, Any]:
    return {"agent_options": {"max_turns": count}}


def test_options_of_an_agent_that_is_not_the_projects_are_the_runners_own() -> None:
    assert _check().for_rollout(_turns(5)).settings.agent_options == {"max_turns": 5}
    for own in ({"agent": "os:system", "backend": "custom"}, {"backend": "command"}):
        with pytest.raises(RequestRefusedError, match=r"this runner's agent_options is {}, .* the same --agent-option"):
            _check(**own).for_rollout(_turns(5))


def test_a_runner_makes_no_number_of_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groundwire.train.rollouts.runner.agent._MAX_AGENTS", 3)
    remote = RemoteRolloutAgent(_check())
    assert remote._agent_for(_turns(5)) is remote._agent_for(_turns(5))
    remote._agent_for(_turns(6))
    with pytest.raises(RequestRefusedError, match="an agent for each of 3 settings and makes no more: start it again"):
        remote._agent_for(_turns(7))


async def test_a_runner_uses_the_agent_options_of_each_rollout(own_task: dict[str, Any]) -> None:
    async with _model("SELECT broken") as (url, requests), _store() as (_, client), _runner(client):
        for turns in (1, 3):
            requests.clear()
            options = {"max_turns": turns, "check_last": True}
            await _result(client, own_task, url, metadata={"settings": {"agent_options": options}})
            assert len(requests) == 2 * turns  # each turn writes a query and checks it


def test_the_environment_names_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIDER_DATA_DIR", str(tmp_path))
    assert _may_read(tmp_path / "x.sqlite")


async def test_a_runner_without_its_data_stops_at_once() -> None:
    async with _store() as (address, _):
        command = ("-m", "train.runner", "--external-store-address", address, "--data-dir", "/nowhere")
        done = await asyncio.to_thread(run, *command)
    assert done.returncode == 2
    assert "--data-dir /nowhere does not exist" in done.stderr


def test_a_trainer_without_runners_shows_the_command_for_them() -> None:
    config = resolve("fast", reward="spider_test_suite", external_store_address=STORE, n_runners=0)
    assert prepare(config).notes[-1] == (
        f"runners: start them with groundwire runner --external-store-address {STORE} --backend langgraph "
        "--domain spider --reward spider_test_suite"
    )


def test_the_command_for_a_runner_has_the_options_of_the_run() -> None:
    judge = {"model": "m", "base_url": "http://h/v1", "samples": 3, "temperature": 0.5, "swap_order": True}
    config = resolve(
        "fast",
        reward="executes + rule_judge_hybrid",
        judge=judge,
        data_dir="/data",
        external_store_address="http://10.0.0.5:4747",
        proxy_host="10.0.0.7",
    )
    assert config.runner_options() == [
        *("--backend", "langgraph", "--domain", "spider", "--reward", "executes + rule_judge_hybrid"),
        *("--data-dir", "/data", "--judge-model", "m", "--judge-base-url", "http://h/v1", "--policy-host", "10.0.0.7"),
        *("--judge", "temperature=0.5", "--judge", "samples=3", "--judge", "swap_order=True"),
    ]
    processes = resolve("fast", rollout_process="spawn", agent_folder="empty", sealed=True)
    assert processes.runner_options()[4:] == ["--rollout-process", "spawn", "--agent-folder", "empty", "--sealed"]
    assert not processes.for_agents().keys() & {"rollout_process", "agent_folder", "sealed"}
    assert resolve("fast").runner_options() == ["--backend", "langgraph", "--domain", "spider"]
