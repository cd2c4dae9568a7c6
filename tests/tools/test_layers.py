"""The base install is light: it needs no model, no trainer and no agent framework; a missing layer is one sentence."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from programs import ROOT

from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.rewards.judge.client import JudgeClient
from groundwire.rewards.judge.settings import JudgeSettings
from groundwire.tools.errors import missing_layer
from groundwire.train import evaluate
from groundwire.train.config.errors import ConfigError
from groundwire.train.rollouts.agent_python import find_agent_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# A sitecustomize of programs: the modules of packages that the base does not install are missing.
BASE = """
import sys

MISSING = frozenset({missing!r})

class Base:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Base())
"""


def _name(distribution_name: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution_name).lower()


def _closure(requirements: list[str]) -> set[str]:
    """The installed distributions that ``requirements`` need."""
    found: set[tuple[str, str]] = set()
    left = [(Requirement(each), "") for each in requirements]
    while left:
        requirement, parent_extra = left.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": parent_extra}):
            continue
        name = _name(requirement.name)
        for extra in requirement.extras or {""}:
            if (name, extra) not in found:
                found.add((name, extra))
                try:
                    needed = distribution(name).requires or []
                except PackageNotFoundError:
                    continue
                left += [(Requirement(each), extra) for each in needed]
    return {name for name, _ in found}


@functools.cache
def _owners() -> Mapping[str, list[str]]:
    """The distributions of each module; to find them takes a second."""
    return packages_distributions()


def _write_finder(folder: Path, requirements: list[str]) -> None:
    """A sitecustomize with which a program finds only what ``requirements`` install."""
    installed = {*_closure(requirements), "groundwire"}
    modules = _owners().items()
    missing = [module for module, owners in modules if installed.isdisjoint(map(_name, owners))]
    (folder / "sitecustomize.py").write_text(BASE.format(missing=sorted(missing)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program that finds the base's packages only."""
    folder = tmp_path_factory.mktemp("base")
    _write_finder(folder, PROJECT["dependencies"])
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}"}


def _python(*arguments: str, base: dict[str, str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, cwd=folder, capture_output=True, text=True, env=base
    )


def test_the_base_has_no_model_no_trainer_and_no_framework() -> None:
    closure = _closure(PROJECT["dependencies"])
    heavy = (
        "torch transformers litellm agentlightning langgraph langchain-core openai-agents openai pandas pyarrow numpy "
        "fastmcp mcp uvicorn starlette"
    )
    assert not closure & set(heavy.split())


def test_the_base_changes_no_package_of_an_application() -> None:
    for each in PROJECT["dependencies"]:
        bounds = {part.operator for part in Requirement(each).specifier}
        assert bounds <= {">="}, each


def test_tools_rewards_and_adapters_work_with_the_base(base: dict[str, str], tmp_path: Path) -> None:
    code = """
import sqlite3
sqlite3.connect("a.sqlite").executescript("CREATE TABLE t (n int); INSERT INTO t VALUES (3);")
import groundwire.adapters, groundwire.domains, groundwire.rewards
import groundwire.adapters.tracing.proxy, groundwire.adapters.agents.redirection
from groundwire.adapters.agents.backend import agent_backend
from groundwire.rewards import get
from groundwire.tools.schema import table_info
from groundwire.rewards.spider.execution_match import execution_match
agent_backend(lambda task: "SELECT 3")
get("spider_exec_match"), get("spider_test_suite"), get("executes")
print(execution_match("SELECT n FROM t", "SELECT n FROM t", "a.sqlite").score, table_info("a.sqlite").text)
"""
    done = _python("-c", code, base=base, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1.0 CREATE TABLE")
    help_text = _python("-m", "groundwire.train.cli.app", "mcp-sql", "--help", base=base)
    assert "--database" in help_text.stdout


@pytest.mark.parametrize(
    "command",
    [["cli.app", "run", "--steps", "1"], ["run"], ["audit"], ["report", "."], ["store", "--memory"]],
    ids=lambda command: command[0],
)
def test_a_missing_layer_is_one_sentence_with_its_command(base: dict[str, str], command: list[str]) -> None:
    done = _python("-m", f"groundwire.train.{command[0]}", *command[1:], base=base)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    message = r"error: this needs [a-z0-9]+, which is not installed: pip install 'groundwire\[train\]'\n"
    assert re.fullmatch(message, done.stderr), done.stderr


@pytest.mark.parametrize(
    "command",
    [["groundwire.tools.mcp_sql", "--database", "."], ["groundwire.train.cli.app", "mcp-sql", "--database", "."]],
)
def test_the_mcp_server_without_its_layer_is_one_sentence_with_its_command(
    base: dict[str, str], command: list[str]
) -> None:
    done = _python("-m", *command, base=base)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: this needs fastmcp, which is not installed: pip install 'groundwire[mcp]'\n"


def test_the_agent_that_uses_the_mcp_server_names_the_missing_layer(base: dict[str, str]) -> None:
    done = _python("-c", "from groundwire.adapters import get; get('mcp')", base=base)
    assert "No module named 'httpx2'" in done.stderr
    assert missing_layer(ModuleNotFoundError(name="httpx2")).endswith("pip install 'groundwire[mcp]'")


def test_the_lock_file_has_a_version_of_everything_that_the_trainer_installs() -> None:
    locked: dict[str, list[str]] = {}
    for line in (ROOT / "requirements" / "train.txt").read_text().splitlines():
        name, _, version = line.partition(";")[0].strip().partition("==")
        locked.setdefault(_name(name.partition("[")[0]), []).append(version)
    extras = PROJECT["optional-dependencies"]
    wanted = [
        *PROJECT["dependencies"],
        *(each for extra in ("langgraph", "openai-agents", "mcp") for each in extras[extra]),
    ]
    wanted += [each for each in extras["train"] if not each.startswith("groundwire[")]
    for each in map(Requirement, wanted):
        versions = locked.get(_name(each.name), [])
        assert versions, f"{each} is not in requirements/train.txt: make lock"
        assert all(each.specifier.contains(version) for version in versions), f"{each}: {versions}: make lock"


APP = """
import concurrent.futures
import httpx

client = httpx.Client(base_url="https://api.example.com/v1", headers={"Authorization": "Bearer sk-of-the-app"})

def ask(question):
    messages = [{"role": "user", "content": question}]
    reply = client.post("/chat/completions", json={"model": "gpt-5-mini", "messages": messages})
    return reply.json()["choices"][0]["message"]["content"]

def answer(task):
    assert "zone" not in task and task.city == "Bonn"
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return threads.submit(ask, task.question).result()

async def reward(task, answer, steps):
    return float(answer == "SELECT 1" and task["zone"] == "a")
"""


async def test_an_agent_runs_in_its_own_environment_which_needs_the_base_only(
    base: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_app.py").write_text(APP)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={base["PYTHONPATH"]!r} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    tasks = [{"question": question, "zone": "a", "city": "Bonn"} for question in ("one", "two")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    settings: dict[str, Any] = {"n_runners": 3, "retries": 0, "quiet": True, "reward": "own_app:reward"}
    async with ScriptedPolicyServer(replies=lambda _: "SELECT 1") as policy:
        settings |= {"model": policy.model, "base_url": policy.base_url, "output_dir": tmp_path}
        result = await asyncio.to_thread(
            evaluate, "own_app:answer", "tasks.jsonl", runner_python=str(python), **settings
        )
        words = ["--domain", "tasks.jsonl", "--reward", "own_app:reward", "--output-dir", "runs"]
        words += ["--runner-python", str(python), "--base-url", policy.base_url, "--model", policy.model]
        trainer = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done, failed = [
            await asyncio.to_thread(
                _python,
                *("-m", "groundwire.train.evaluate", *words, "--agent", f"own_app:{name}"),
                base=trainer,
                folder=tmp_path,
            )
            for name in ("answer", "missing")
        ]
    assert done.stderr.startswith(  # the trainer cannot import them
        "agent: called as own_app:answer(task=the task)\nreward: called as reward(task=the task, answer=the answer, "
        "steps=the agent's steps)\n"
    )
    assert "the agent sees: question, city; hidden: zone\n" in done.stderr
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: in the environment of runner_python: agent 'own_app:missing': own_app has")
    assert (result.accuracy.value, result.accuracy.n) == (1.0, 2)  # all tasks of the file
    assert [len(calls) for calls in result.rollouts["calls"]] == [1, 1]
    assert "own_app" not in sys.modules


def test_an_interpreter_without_the_base_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'groundwire'\" >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(
        ConfigError, match=rf"No module named 'groundwire'.*: install it with {python} -m pip install {ROOT}"
    ):
        find_agent_python(str(python))
    with pytest.raises(ConfigError, match="there is no such command"):
        find_agent_python("no-such-python")
    assert find_agent_python(sys.executable) == sys.executable


def test_a_judge_of_a_provider_names_the_missing_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groundwire.rewards.judge.client.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as caught:
        JudgeClient(JudgeSettings(model="openai/gpt-5-mini"))
    assert missing_layer(caught.value).endswith("pip install 'groundwire[judge]'")
    JudgeClient(JudgeSettings(model="m", base_url="http://127.0.0.1:1/v1"))


def test_a_function_of_python_names_the_missing_layer(base: dict[str, str]) -> None:
    done = _python("-c", "from groundwire.train import fit; fit(print, 'spider')", base=base)
    message = "CommandError: this needs torch, which is not installed: pip install 'groundwire[train]'"
    assert done.stderr.splitlines()[-1].endswith(message)
