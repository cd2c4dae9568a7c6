"""``groundwire init``, and ``look`` and ``train``, which read what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run

AGENT = """
from openai import OpenAI
def answer(question):
    reply = OpenAI().chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content
"""
SMALL = ("--steps", "1", "--tasks-per-step", "1", "--group-size", "2", "--max-tokens", "4", "--config", "fast")


def _groundwire(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "groundwire", *arguments, folder=folder)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "my_app.py").write_text(AGENT)
    return tmp_path


def test_three_commands_lead_from_a_folder_to_a_trained_model(app: Path) -> None:
    done = _groundwire(app, "init", "--model", "starter")
    assert done.returncode == 0, done.stderr
    assert "agent   my_app.py:answer, function of the question" in done.stdout
    assert {"groundwire.toml", "tasks.jsonl", "reward.py"} <= {file.name for file in app.iterdir()}
    tasks = [json.loads(line) for line in (app / "tasks.jsonl").read_text().splitlines()]
    assert len(tasks) == 3
    assert all(task["question"] and task["expected"] for task in tasks)
    looked = _groundwire(app, "look")
    assert "agent: called as my_app.py:answer(question=the question)" in looked.stdout, looked.stderr
    assert "the agent sees: question; hidden: expected" in looked.stdout
    assert "verdict" in looked.stdout
    trained = _groundwire(app, "train", *SMALL, "--watch")
    assert "tasks.jsonl: train 2 tasks" in trained.stdout, trained.stderr
    [run_dir] = [path for path in (app / "runs").iterdir() if not path.is_symlink()]
    config = json.loads((run_dir / "config.json").read_text())
    assert config["steps"] == 1  # an option wins over the file
    assert config["learning_rate"] == 5e-5  # the file over the preset
    assert "report: http://127.0.0.1:" in trained.stdout
    assert trained.stdout.count("show the model right answers first: --warm-start FILE") == 1
    assert trained.stdout.index("--warm-start FILE") < trained.stdout.index("step   1/1")


def test_a_warm_start_fine_tunes_first_and_trains_that_model(app: Path) -> None:
    _groundwire(app, "init", "--model", "starter")
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "ok"}]
    (app / "chats.jsonl").write_text(3 * (json.dumps({"messages": messages}) + "\n"))
    done = _groundwire(app, "train", *SMALL, "--warm-start", "chats.jsonl")
    assert "warm start: fine-tunes starter on the chats of chats.jsonl" in done.stdout, done.stderr
    [config] = (json.loads(file.read_text()) for file in (app / "runs").glob("2*/config.json"))
    assert config["model"].endswith("-chats/model")
    both = _groundwire(app, "train", "--warm-start", "chats.jsonl", "--resume", "runs/latest")
    assert both.returncode == 2
    assert "exclude each other" in both.stderr
    shown = _groundwire(app, "train", "--print-config", "--warm-start", "none.jsonl")
    assert (shown.returncode, "--warm-start none.jsonl does not exist" in shown.stderr) == (2, True)


def test_a_folder_without_settings_is_told_what_is_taken(app: Path) -> None:
    shown = _groundwire(app, "train", "--print-config", "--trainer", "local")
    assert (
        "this folder has no groundwire.toml, so the bundled text-to-SQL agent and its tasks are taken" in shown.stderr
    )
    named = _groundwire(app, "train", "--print-config", "--trainer", "local", "--agent", "my_app:answer")
    assert "no groundwire.toml" not in named.stderr


def test_what_exists_is_kept(app: Path) -> None:
    (app / "reward.py").write_text("mine = 1\n")
    done = _groundwire(app, "init")
    assert "kept    reward.py" in done.stdout, done.stderr
    assert (app / "reward.py").read_text() == "mine = 1\n"
    again = _groundwire(app, "init")
    assert again.returncode == 2
    assert "groundwire.toml exists: edit it, or delete it" in again.stderr


def test_without_an_agent_or_with_several_it_says_what_to_do(tmp_path: Path, app: Path) -> None:
    (app / "second.py").write_text(AGENT)
    several = _groundwire(app, "init")
    assert several.returncode == 2
    assert "my_app.py:answer" in several.stdout
    assert "2 agents were found: name one with --agent, e.g. --agent my_app.py:answer" in several.stderr
    assert not (app / "groundwire.toml").exists()
    assert _groundwire(app, "init", "--agent", "second:answer").returncode == 0
    assert 'agent = "second:answer"' in (app / "groundwire.toml").read_text()
    (empty := tmp_path / "empty").mkdir()
    none = _groundwire(empty, "init")
    assert none.returncode == 2
    assert "no agent was found in" in none.stderr
    assert "--agent module:name" in none.stderr


def test_the_environment_of_the_app_is_found_and_must_have_the_base(app: Path) -> None:
    scripts = app / ".venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(app / ".venv")], check=True)
    lacking = _groundwire(app, "init", "--no-install")
    assert lacking.returncode == 2
    assert "groundwire cannot be imported there" in lacking.stderr
    assert "--install" in lacking.stderr
    assert not (app / "groundwire.toml").exists()
    (scripts / "python").unlink()
    (scripts / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # an environment with the base
    (scripts / "python").chmod(0o755)
    assert _groundwire(app, "init", "--no-install").returncode == 0
    assert 'runner_python = ".venv/bin/python"' in (app / "groundwire.toml").read_text()


def test_the_reward_that_it_writes_passes_the_attack(app: Path) -> None:
    assert _groundwire(app, "init").returncode == 0
    tasks, reward = app / "tasks.jsonl", "./reward.py:reward"
    attacked = _groundwire(app, "audit", "--attack", "--minutes", "0", "--tasks", str(tasks), "--reward", reward)
    assert "fit to train on" in attacked.stdout, attacked.stdout + attacked.stderr
    assert attacked.returncode == 0
