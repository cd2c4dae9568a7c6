"""An agent's own tools cannot change the data: each rollout has a private copy of its database."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from no_data import NoData

from groundwire import adapters
from groundwire.adapters import Answer, Endpoint, Question, agent_backend
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.domains import Task
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.tools.sql import DatabaseCopies
from groundwire.train import evaluate
from groundwire.train.api.training import _conclude, make_job
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.job.job import parse_arguments
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.runner.agent import RemoteRolloutAgent, RolloutAgent
from groundwire.train.rollouts.runner.pool import RunnerPool
from groundwire.train.rollouts.runner.request_check import RequestCheck
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Rollout

GOLD = "SELECT name FROM singer"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    path = tmp_path / "music" / "music.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE singer (id int, name text); INSERT INTO singer VALUES (1, 'Ann');")
    (path.parent / "schema.sql").write_text("CREATE TABLE singer (id int, name text);\n")
    return {"id": "t1", "question": "Which singers?", "query": GOLD, "db_path": str(path)}


seen: list[str] = []


async def careless(question: Question, endpoint: Endpoint) -> Answer:
    """An agent whose SQL tool can write, and whose model says CREATE TABLE."""
    import openai

    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": question.text}]
        reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
    sql = reply.choices[0].message.content or ""
    seen.append(question.database)
    assert question.columns["db_path"] == question.database
    assert (Path(question.database).parent / "schema.sql").is_file()
    with closing(sqlite3.connect(question.database)) as connection:
        connection.executescript(sql)
        connection.commit()
    return Answer(text=GOLD)


async def _reward(task: Any, answer: str, steps: Any) -> float:
    return execution_match(answer, task["query"], task["db_path"]).score


def _content(task: Task) -> bytes:
    return Path(task["db_path"]).read_bytes()


class _Domain(NoData):
    default_reward = "spider_exec_match"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def database_folders(self, data_dir: str | None = None) -> list[str]:
        return [str(self.folder)]


@asynccontextmanager
async def _runner(agent: Any, sql: str) -> AsyncIterator[RolloutCollector]:
    store = MemoryStore()
    async with (
        ScriptedPolicyServer(replies=lambda _: sql) as server,
        LLMProxy(upstreams=[server.base_url], sink=store) as proxy,
    ):
        runners = RunnerPool(store=store, agent=agent, n_runners=2, poll_s=0.05)
        await runners.start()
        try:
            yield RolloutCollector(store=store, proxy=proxy, model=server.model, notify_runners=runners.notify)
        finally:
            await runners.stop()


async def _results(agent: Any, task: Task, sql: str, count: int = 3) -> list[Rollout]:
    seen.clear()
    async with _runner(agent, sql) as collector:
        return await collector.run([Rollout(task=task, group="t1") for _ in range(count)], deadline_s=30)


WRITES = "CREATE TABLE IF NOT EXISTS notes (t text); DELETE FROM singer;"


async def test_an_agent_that_writes_changes_its_own_copy_only(task: Task, caplog: pytest.LogCaptureFixture) -> None:
    originals, content = DatabaseCopies(), _content(task)
    originals.remember([task["db_path"]])
    agent = RolloutAgent(backend=agent_backend(careless), domain=NoData(), reward=_reward, timeout_s=10)
    results = await _results(agent, task, WRITES)
    assert [each.outcome.reward for each in results] == [1.0] * 3  # the reward reads the original
    assert _content(task) == content
    assert not originals.warning()
    assert len(set(seen)) == 3  # a changed copy serves no other rollout
    assert task["db_path"] not in seen
    assert "an agent changed its copy of" in caplog.text
    agent.close()
    assert not any(map(os.path.exists, seen))


async def test_a_remote_runners_agent_that_writes_changes_its_own_copy_only(task: Task) -> None:
    content = _content(task)
    settings = AgentSettings(backend="custom", agent=f"{__name__}:careless", domain="spider", rollout_process="off")
    domain = _Domain(Path(task["db_path"]).parent)
    check = RequestCheck.of(settings, domain, data_dir=None, policy_hosts=[], store="http://127.0.0.1:1")
    agent = RemoteRolloutAgent(check)
    results = await _results(agent, task, WRITES)
    await agent.stop()
    assert [each.outcome.reward for each in results] == [1.0] * 3
    assert len(set(seen)) == 3
    assert _content(task) == content


async def test_an_agent_that_only_reads_gets_the_same_copy_again(task: Task) -> None:
    agent = RolloutAgent(backend=agent_backend(careless), domain=NoData(), reward=_reward, timeout_s=10)
    await _results(agent, task, "SELECT 1", count=6)
    assert len(set(seen)) <= 2  # two runners
    agent.close()


async def test_a_runner_ends_with_a_warning_about_changed_data(task: Task, caplog: pytest.LogCaptureFixture) -> None:
    async def own_path(question: Question, endpoint: Endpoint) -> Answer:
        answer = await careless(question, endpoint)
        with closing(sqlite3.connect(task["db_path"])) as connection:
            connection.executescript(WRITES)
        return answer

    domain = _Domain(Path(task["db_path"]).parent)
    settings = AgentSettings(backend="custom", agent=f"{__name__}:careless", domain="spider", rollout_process="off")
    remote = RemoteRolloutAgent(
        RequestCheck.of(settings, domain, data_dir=None, policy_hosts=[], store="http://127.0.0.1:1")
    )
    remote._agent_for({}).backend = agent_backend(own_path)
    await _results(remote, task, "SELECT 1", count=1)
    await remote.stop()
    assert f"1 of 1 databases were changed during the run ({task['db_path']})" in caplog.text


def test_a_large_database_has_one_copy_in_read_only_mode(task: Task) -> None:
    copies = DatabaseCopies(private_bytes=100)
    one, other = copies.take(task["db_path"]), copies.take(task["db_path"])
    assert one is other
    assert os.stat(one.path).st_mode & 0o222 == 0
    os.chmod(one.path, 0o600)
    with closing(sqlite3.connect(one.path)) as connection:  # what root can do without a chmod
        connection.executescript(WRITES)
    copies.give_back(one)
    assert copies.take(task["db_path"]) is not one
    assert os.path.isfile(other.path)  # its rollout has not ended
    copies.give_back(other)
    assert not os.path.exists(other.path)
    copies.close()


def test_a_copy_of_a_file_that_has_changed_is_made_again(task: Task) -> None:
    copies = DatabaseCopies()
    copies.give_back(old := copies.take(task["db_path"]))
    with closing(sqlite3.connect(task["db_path"])) as connection:
        connection.execute("INSERT INTO singer VALUES (2, 'Bob')")
        connection.commit()
    with closing(sqlite3.connect((new := copies.take(task["db_path"])).path)) as connection:
        assert connection.execute("SELECT count(*) FROM singer").fetchone() == (2,)
    assert new is not old
    copies.close()


def test_idle_copies_are_removed_beyond_a_size(task: Task, tmp_path: Path) -> None:
    copies = DatabaseCopies(idle_bytes=10_000)
    for number in range(3):
        path = tmp_path / f"{number}.sqlite"
        shutil.copy(task["db_path"], path)
        copies.give_back(copies.take(str(path)))
    assert len(copies._copies) == 1
    copies.close()


def test_a_copy_whose_agent_may_still_run_serves_no_other_rollout(task: Task) -> None:
    copies = DatabaseCopies()
    copies.give_back(one := copies.take(task["db_path"]), reusable=False)
    assert copies.take(task["db_path"]) is not one
    copies.close()


async def test_an_agent_is_given_no_pipe_in_place_of_its_database(task: Task) -> None:
    os.remove(task["db_path"])
    os.mkfifo(task["db_path"])
    agent = RolloutAgent(backend=agent_backend(careless), domain=NoData(), reward=_reward, timeout_s=10)
    (result,) = await _results(agent, task, WRITES, count=1)
    assert not seen
    assert result.outcome.reward is None
    assert "it is not a regular file but a pipe" in result.outcome.message


async def test_reference_agents_read_the_database_itself(task: Task) -> None:
    agent = RolloutAgent(backend=adapters.get("langgraph")(), domain=NoData(), reward=_reward)
    async with agent._private(dict(task)) as (private, database):
        assert private == task
        assert database == task["db_path"]
    await asyncio.gather(agent.backend.stop())


async def test_a_run_ends_with_a_warning_about_changed_data(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def own_path(question: Question, endpoint: Endpoint) -> Answer:
        answer = await careless(question, endpoint)
        with closing(sqlite3.connect(task["db_path"])) as connection:
            connection.executescript(WRITES)
        return answer

    async with ScriptedPolicyServer(replies=lambda _: "SELECT 1") as policy:
        given = {"model": policy.model, "base_url": policy.base_url, "output_dir": tmp_path / "runs", "quiet": True}
        await asyncio.to_thread(evaluate, own_path, [task], lambda task, answer: 1.0, **given)
    assert f"warning: 1 of 1 databases were changed during the run ({task['db_path']})" in capsys.readouterr().err

    tasks = [{**task, "id": f"t{number}"} for number in range(2)]
    given, objects = parse_arguments(
        own_path, tasks, lambda task, answer: 1.0, {"output_dir": str(tmp_path)}, train=True
    )
    job = make_job(given, objects=objects)
    with closing(sqlite3.connect(task["db_path"])) as connection:
        connection.executescript("CREATE TABLE more (t text)")
    run = RunDir.create(tmp_path, backend="custom", domain="spider", config=job.config.to_dict())
    _conclude(job, run)
    assert "warning: 1 of 1 databases were changed during the run" in capsys.readouterr().err
