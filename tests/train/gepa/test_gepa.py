"""``--trainer gepa`` finds better prompts within its budget, and goes on where it was killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import external_processes
import pytest
from programs import Program, run
from typer.testing import CliRunner

from groundwire import adapters
from groundwire.adapters import agent_backend
from groundwire.adapters.sql_agents.prompts import FIELDS, PROFILES, fill
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.domains import TaskData
from groundwire.domains.task_list import task_list
from groundwire.rewards import reward_function
from groundwire.train import run as run_command
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.job.job import Job, ModelEndpoint
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.event_loop import EventLoopThread

pytest.importorskip("gepa")

from groundwire.tools.sql.answers import SQL
from groundwire.train.gepa import trainer
from groundwire.train.gepa.adapter import Journal, ReflectionError
from groundwire.train.gepa.trainer import PromptTrainer

TASKS = [{"id": f"t{n}", "question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(24)]
RULE, MORE = "Answer with the number alone.", "Add the two numbers."


async def adder(question: adapters.Question, endpoint: adapters.Endpoint) -> str:
    import openai

    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none") as client:
        reply = await client.chat.completions.create(
            model=endpoint.model,
            messages=[
                {"role": "system", "content": endpoint.prompts["instructions"]},
                {"role": "user", "content": question.text},
            ],
        )
    return reply.choices[0].message.content or ""


adder.prompts = {"instructions": "Help."}  # type: ignore[attr-defined]


def policy(body: dict[str, Any]) -> str:
    """Right for half of the tasks with one rule in its prompt, and for all with two."""
    if len(body["messages"]) == 1:  # the command asks what the endpoint accepts
        return "Yes."
    system, question = (message["content"] for message in body["messages"])
    number = int(question.split()[2])
    known = RULE in system and (MORE in system or number % 2)
    return str(2 * number) if known else "I do not know."


class _Reflection:
    """Adds the rule that the present prompt lacks, every second time."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, body: dict[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        self.prompts.append(text)
        present = text.split("```")[1].strip()
        if len(self.prompts) % 2:
            return "```\nHelp more.\n```"
        rule = MORE if RULE in present else RULE
        return f"The agent lacks a rule.\n```\n{present} {rule}\n```"


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[dict[str, Any]], str]], str]]:
    """``serve(script)``: the base URL of a scripted server on a loop of its own."""
    import asyncio

    loop = EventLoopThread(asyncio.new_event_loop(), max_blocked_s=60)
    loop.start()
    servers: list[ScriptedPolicyServer] = []

    def started(script: Callable[[dict[str, Any]], str]) -> str:
        server = ScriptedPolicyServer(script, model="m")
        loop.call(server.start())
        servers.append(server)
        return server.base_url

    yield started

    async def stop() -> None:
        for server in servers:
            await server.stop()

    loop.stop(stop())


@pytest.fixture(autouse=True)
def _few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_PARETO_TASKS", 6)
    monkeypatch.setattr(trainer, "_REFLECTION_TASKS", 3)


def _config(reflection: str, **changes: Any) -> RunConfig:
    given = {"val_tasks": 0, "n_runners": 8, "reflection_model": f"teacher@{reflection}"}
    return resolve("fast", trainer="gepa", model="m", **{**given, **changes})


def _right(task: Any, answer: str) -> float:
    return float(answer == task["answer"])


def _trainer(config: RunConfig, run: RunDir, url: str, reward: Callable[[Any, str], float] = _right) -> PromptTrainer:
    domain = task_list(TASKS, validation=0.3)
    backend = agent_backend(adder)
    job = Job(
        config=config,
        data=domain.load(),
        domain=domain,
        backend=backend,
        reward=reward_function(reward),
        endpoint=ModelEndpoint(url),
    )
    return PromptTrainer(job, run=run, callback=ProgressCallback())


def test_better_prompts_are_found_and_a_killed_run_pays_for_nothing_twice(
    serve: Callable[[Callable[[dict[str, Any]], str]], str], tmp_path: Path
) -> None:
    asked: list[str] = []

    def counted(body: dict[str, Any]) -> str:
        if body["messages"][0]["content"] != "Say hello.":  # the endpoint is asked first what it accepts
            asked.append(body["messages"][0]["content"])
        return policy(body)

    reflection = _Reflection()
    url, teacher = serve(counted), serve(reflection)
    run = RunDir.create(tmp_path, backend="custom", domain="tasks", config={})
    _trainer(_config(teacher, prompt_budget=20), run, url).train()  # as if it was killed early
    paid, reflected = len(Journal(run.path / "rollouts.jsonl").entries), len(reflection.prompts)
    assert 0 < paid <= 26  # GEPA ends the iteration in which the budget ends
    with (run.path / "rollouts.jsonl").open("a") as file:
        file.write('{"key": "torn')

    assert [line["step"] for line in run.metrics()] == [0, 1]
    before = len(asked)
    best = _trainer(_config(teacher, prompt_budget=90), run, url).train()
    assert best == json.loads((run.path / "prompts.json").read_text())
    assert RULE in best["instructions"]
    assert MORE in best["instructions"]
    entries = len(Journal(run.path / "rollouts.jsonl").entries)
    line = run.metrics()[-1]
    assert line["rollouts"] == entries - paid
    assert len(asked) - before == entries - paid + line["validation"]["n"]
    assert line["validation"]["accuracy"] == line["reward"] == 1.0
    assert run.metrics()[0]["validation"]["accuracy"] == 0.0
    assert len(Journal(run.path / "reflections.jsonl").entries) == len(reflection.prompts) > reflected

    front = json.loads((run.path / "gepa.json").read_text())
    assert front["candidates"][0] == {"prompts": adder.prompts, "score": 0.0, "parents": [], "best_on_tasks": 0}
    assert front["candidates"][front["best"]]["prompts"] == best
    assert front["candidates"][front["best"]]["parents"]
    shown = reflection.prompts[0]
    assert "What is" in shown
    assert "I do not know." in shown
    assert "0 of 1" in shown
    assert not any(f'"answer": "{task["answer"]}"' in shown for task in TASKS)


_OWN = """
import openai

async def adder(question, endpoint):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none") as client:
        messages = [{"role": "system", "content": endpoint.prompts["instructions"]}]
        messages += [{"role": "user", "content": question.text}]
        reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
    return reply.choices[0].message.content

adder.prompts = {"instructions": "Help."}

def right(task, answer):
    return float(answer == task["answer"])
"""


def test_runners_of_an_external_store_run_the_agent_with_the_prompts_of_the_search(
    serve: Callable[[Callable[[dict[str, Any]], str]], str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(_OWN)
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    port = external_processes.free_port()
    shared = ("--external-store-address", f"http://127.0.0.1:{port}", "--backend", "custom", "--agent", "mine:adder")
    shared += ("--domain", "tasks.jsonl", "--reward", "mine:right")
    ends = ("--base-url", serve(policy), "--model", "m")
    sizes = ("--prompt-budget", "90", "--n-runners", "0")
    others = [
        Program("-m", "groundwire.train.store", "--path", "store.db", "--port", str(port), folder=tmp_path),
        Program("-m", "groundwire.train.runner", *shared, folder=tmp_path),
    ]
    try:
        command = ("-m", "groundwire.train.run", "--trainer", "gepa", *shared, *ends, *sizes)
        done = run(*command, "--reflection-model", f"teacher@{serve(_Reflection())}", folder=tmp_path)
    finally:
        for program in others:
            program.send_signal(signal.SIGTERM)
        ended = [program.wait(600) for program in others]
    assert done.returncode == 0, (done.stdout, done.stderr, ended)
    best = json.loads((tmp_path / "runs" / "latest" / "prompts.json").read_text())
    assert RULE in best["instructions"]
    assert MORE in best["instructions"]


def test_a_reflection_model_that_does_not_answer_ends_the_run(
    serve: Callable[[Callable[[dict[str, Any]], str]], str], tmp_path: Path
) -> None:
    run = RunDir.create(tmp_path, backend="custom", domain="tasks", config={})
    with pytest.raises(ReflectionError, match=r"the reflection model teacher at .* gives no reply"):
        _trainer(_config("http://127.0.0.1:9/v1"), run, serve(policy)).train()
    assert not (run.path / "prompts.json").exists()


def test_a_reward_that_fails_for_most_answers_ends_the_run(
    serve: Callable[[Callable[[dict[str, Any]], str]], str], tmp_path: Path
) -> None:
    def two(task: Any, answer: str) -> float:
        if task["id"] in ("t0", "t1"):
            return 1.0
        raise NameError(task["id"])

    run = RunDir.create(tmp_path, backend="custom", domain="tasks", config={})
    config = _config("http://127.0.0.1:9/v1", retries=0)
    trainer = _trainer(config, run, serve(policy), two)
    trainer.data = TaskData(train=TASKS, validation=TASKS[:5], source="a test")
    with pytest.raises(RolloutsFailedError, match=r"3 of 5 validation rollouts have no reward; .* NameError: t\d"):
        trainer.train()


def test_a_value_without_a_field_in_the_prompt_stands_at_its_end_and_fills_no_other() -> None:
    values = {"question": "How many {result}?", "result": "3"}
    assert fill("{result} for {question} {x}", values) == "3 for How many {result}? {x}"
    assert fill("Think.", values) == "Think.\nQuestion: How many {result}?\nResult: 3"


def test_each_prompt_of_the_sql_agents_has_all_its_fields() -> None:
    for texts in PROFILES.values():
        assert texts.keys() == FIELDS.keys()
        for name, fields in FIELDS.items():
            assert all(f"{{{field}}}" in texts[name] for field in fields)


@pytest.mark.parametrize("backend", ["langgraph", "openai-agents"])
async def test_a_sql_agent_asks_with_the_prompts_of_its_rollout(backend: str, tmp_path: Path) -> None:
    import sqlite3

    sqlite3.connect(tmp_path / "d.sqlite").execute("CREATE TABLE singer (age)").connection.close()
    agent = adapters.get(backend)()
    question = adapters.Question(id="q", text="How old?", database=str(tmp_path / "d.sqlite"), answers=SQL)
    async with ScriptedPolicyServer(lambda body: "```sql\nSELECT 1\n``` CORRECT") as server:
        for prompts in ({}, {"write": "Please: {question}"}):
            endpoint = adapters.Endpoint(base_url=server.base_url, model="m", prompts=prompts)
            assert (await agent.run(question, endpoint)).text == "SELECT 1"
        asked = [request["messages"][1]["content"] for request in server.requests]
    assert "Question: How old?\nWrite the query." in asked
    assert "Please: How old?" in asked
    await agent.stop()


def _refused(*arguments: str) -> str:
    result = CliRunner().invoke(run_command.app, [*arguments, "--print-config"])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_a_file_of_prompts_is_read_and_its_names_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text('{"system": "Be right. {table_info}"}')
    assert resolve("fast", prompts=str(file)).prompts == {"system": "Be right. {table_info}"}
    file.write_text('{"sistem": "x"}')
    assert "the agent has no prompt 'sistem'; it has system, write, check, rewrite" in _refused("--prompts", str(file))
    file.write_text('{"system": 1}')
    with pytest.raises(ConfigError, match=r"must hold texts by their names, .* but system is 1"):
        resolve("fast", prompts=str(file))
    with pytest.raises(ConfigError, match="No such file"):
        resolve("fast", prompts="nowhere.json")


def test_a_missing_reflection_model_is_said_before_the_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(run_command.app, ["--trainer", "gepa", "--output-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "needs a model that writes prompts: --reflection-model NAME" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_finds_its_endpoint_in_the_run_directory(tmp_path: Path) -> None:
    config = {**_config("http://127.0.0.1:9/v1").to_dict(), "model": "model-of-the-endpoint"}
    without = RunDir.create(tmp_path / "a", backend="langgraph", domain="spider", config=config)
    assert "model-of-the-endpoint" in _refused("--resume", str(without.path))  # no such model is here
    stored = {**config, "base_url": "http://127.0.0.1:9/v1"}
    run = RunDir.create(tmp_path / "b", backend="langgraph", domain="spider", config=stored)
    result = CliRunner().invoke(run_command.app, ["--resume", str(run.path), "--print-config"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("trainer", [["trainer=local"], ["--trainer", "local"], []])
def test_a_trainer_that_updates_a_model_of_its_own_takes_no_endpoint(trainer: list[str]) -> None:
    assert "--base-url needs --dev or --trainer gepa" in _refused("--base-url", "http://127.0.0.1:9/v1", *trainer)
