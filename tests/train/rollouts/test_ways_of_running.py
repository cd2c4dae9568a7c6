"""A rollout is the same however it is run: its requests, its answer, its reward and its failure."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import external_processes
import pytest
from fork_server import Forked
from programs import Program
from spider_folder import make_spider

from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.train import evaluate
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.job.job import parse_arguments
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.store.rows import to_row

AGENT = """
import os
import time
import openai


def agent(turns: int = 1, *, wait_s: float = 0.0, prompts={"system": "my own"}, form="prose"):
    def ask(task):
        time.sleep(wait_s)
        client = openai.OpenAI(api_key="none", max_retries=0)
        seen = {**task, "turns": turns, "form": form, "kept": os.environ.get("KEPT"), "folder": os.listdir()}
        messages = [{"role": "system", "content": prompts["system"]}, {"role": "user", "content": str(seen)}]
        for turn in range(turns + ("one more" in task["question"])):
            reply = client.chat.completions.create(model="x", messages=messages, presence_penalty=0.5)
            messages += [reply.choices[0].message, {"role": "user", "content": "again"}]
        if "fails" in task["question"]:
            raise ValueError(f"of {task['question']}")
        return reply
    return ask


def asked(task):
    return {**task, "more": "of agent_input"}


def first(reply):
    return reply.choices[0].message.content


def longest(task, answer):
    return {"length": len(answer) / 100, "right": float(answer == task["answer"]), "metric/words": 2.0}


def slow(task, answer):
    time.sleep(600)
    return 1.0
"""
TASKS = [
    {"question": "Names?", "answer": "SELECT name FROM pet", "topic": "pets", "info": {"label": "x", "hint": "y"}},
    {"question": "Which one fails?", "answer": "no", "topic": "cars", "info": {"label": "x"}},
    {"question": "Which one calls one more time?", "answer": "no"},
]
SQL = {
    "tasks": "spider",
    "reward": "0.7*spider_exec_match+0.3*executes",
    "agent_options": {"max_turns": 3, "table_info_truncate": 60, "execution_truncate": 20},
}
OWN = {
    "agent": "agent",
    "agent_input": "asked",
    "agent_output": "first",
    "tasks": "tasks",
    "reward": "longest",
    "backend": "custom",
    "prompts": {"system": "of the run"},
    "agent_options": {"turns": 2},
    "agent_columns": "info.label",
    "agent_env": "KEPT",
    "agent_folder": "empty",
    "max_calls": 2,
    "failures": "agent=-0.25",
}
CASES: dict[str, dict[str, Any]] = {
    "langgraph": {**SQL, "backend": "langgraph", "prompts": {"system": "My own: {table_info}"}},
    "check_last": {**SQL, "backend": "langgraph", "agent_options": {"check_last": True, "prompt_profile": "full"}},
    "openai-agents": {**SQL, "backend": "openai-agents"},
    "mcp": {**SQL, "backend": "mcp", "prompts": {"tool_system": "My own: {table_info}"}},
    "an agent": OWN,
    "in fresh processes": {**OWN, "rollout_process": "spawn"},
    "in the runner's process": {**OWN, "rollout_process": "off", "agent_env": None, "agent_folder": None},
    "too slow": {**OWN, "agent_options": {"wait_s": 600.0}, "rollout_timeout_s": 3.0, "retries": 0},
    "a reward that is too slow": {**OWN, "reward": "slow", "reward_timeout_s": 3.0, "retries": 0},
}
_OWN = {"succeeded", "agent", "turn_limit"}
STATUSES = {
    **dict.fromkeys(("an agent", "in fresh processes", "in the runner's process"), _OWN),
    "too slow": {"timeout"},
    "a reward that is too slow": {"reward", "agent", "turn_limit"},
}
WAYS: dict[str, dict[str, Any]] = {
    "a runner process": {"runner_processes": 1},
    "another Python": {"runner_python": sys.executable},
    "an external runner": {"n_runners": 0},
}
_COMPARED = ("task_id", "status", "message", "reward", "reward_components", "answer", "agent_steps", "query_scores")
_OF_ONE_RUN = {"prompt_cache_key"}


@contextmanager
def _external_runner(folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    """A store, and a runner that is started with the command that a run shows; yields the store's address."""
    port = external_processes.free_port()
    address = f"http://127.0.0.1:{port}"
    store = Forked(external_processes.store, str(folder / "store.db"), port)
    external_processes.wait_for_store(address, store)
    config = resolve("fast", external_store_address=address, **settings)
    runner = Program("-m", "train.runner", "--external-store-address", address, *config.runner_options())
    try:
        yield address
    finally:
        runner.send_signal(signal.SIGTERM)
        runner.wait(600)
        store.kill()


async def _run(way: str, settings: dict[str, Any], folder: Path) -> tuple[list[Any], list[Any]]:
    """What the model was asked, and how the rollouts ended."""
    settings, output = {**settings, **WAYS.get(way, {})}, str(folder / way)
    async with ScriptedPolicyServer(replies=lambda _: "```sql\nSELECT name FROM pet\n```") as policy:

        def run(**store: Any) -> None:
            address = {"model": policy.model, "base_url": policy.base_url}
            with suppress(RolloutsFailedError):
                evaluate(**address, **settings, **store, val_tasks=3, output_dir=output, quiet=True)

        if way == "an external runner":
            named = {"domain" if name == "tasks" else name: value for name, value in settings.items()}
            with _external_runner(folder, named) as address:
                await asyncio.to_thread(run, external_store_address=address)
        else:
            await asyncio.to_thread(run)
    rollouts = list(chain.from_iterable(RunDir.open(f"{output}/latest").rollout_batches(None, [])))
    rows = [{name: value for name, value in to_row(rollout).items() if name in _COMPARED} for rollout in rollouts]
    asked = [{name: value for name, value in body.items() if name not in _OF_ONE_RUN} for body in policy.requests]
    return sorted(asked, key=json.dumps), sorted(rows, key=json.dumps)


def _settings(case: str, folder: Path) -> dict[str, Any]:
    settings = {name: value for name, value in CASES[case].items() if value is not None}
    if "agent" not in settings:
        return {**settings, "data_dir": str(make_spider(folder / "data"))}
    (folder / "mine.py").write_text(AGENT)
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    names = {name: f"{folder}/mine.py:{settings[name]}" for name in ("agent", "agent_input", "agent_output", "reward")}
    return {**settings, **names, "tasks": str(tasks)}


@pytest.mark.parametrize("case", CASES)
async def test_a_rollout_is_the_same_however_it_is_run(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "a tool's")
    settings = _settings(case, tmp_path)
    _, rows = expected = await _run("the run's process", settings, tmp_path)
    assert {row["status"] for row in rows} == STATUSES.get(case, {"succeeded"})
    for way in WAYS:
        assert await _run(way, settings, tmp_path) == expected, way


@pytest.mark.parametrize(
    "elsewhere", [{"n_runners": 0}, {"runner_processes": 2}, {"runner_python": "python"}, {"trainer": "verl"}]
)
def test_other_processes_read_a_file_of_tasks_by_its_name(elsewhere: dict[str, Any], tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    given, objects = parse_arguments("mine:agent", tasks, "mine:longest", elsewhere)
    assert (given["domain"], objects.names()) == (str(tasks), {})
    assert parse_arguments("mine:agent", tasks, "mine:longest", {})[1].names() == {"tasks": "tasks"}
