"""A reward that cannot be computed is not 0: without judged rollouts there is no accuracy, and the run says why."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT
from programs import run as run_program
from rich.console import Console

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.progress import ProgressDisplay, show_summary
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluate import details, table
from groundwire.train.evaluation.metrics import compute_metrics
from groundwire.train.evaluation.notes import RolloutNotes, all_failed, is_transient, lasting_failure, nothing_judged
from groundwire.train.evaluation.run_reader import summarize
from groundwire.train.report.build import build
from groundwire.train.report.charts import draw_curve
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.rows import from_row

REAL = json.loads((ROOT / "tests" / "data" / "rollouts.json").read_text())["langgraph"]

# Fails always, for some questions, from its ninth call on, or from its fourteenth.
PLUGIN = """
import itertools
from groundwire.tools.plugins import hookimpl

calls = itertools.count()

async def gone(task, answer, steps):
    raise FileNotFoundError("the grading service is gone")

async def some(task, answer, steps):
    return await gone(task, answer, steps) if str(task["id"]).endswith("0") else 1.0

async def later(task, answer, steps):
    return await gone(task, answer, steps) if next(calls) >= 8 else 1.0

async def most(task, answer, steps):
    if next(calls) >= 13:
        import a_package_that_is_missing
    return 1.0

@hookimpl
def register_rewards(register):
    for reward in (gone, some, later, most):
        register(reward.__name__, reward)
"""

# Answers what is validated, and hangs where it is trained.
SLOW = """
import openai, time

def answer(question, endpoint):
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=600)
    asked = [{"role": "user", "content": question.text}]
    client.chat.completions.create(model=endpoint.model, messages=asked, **{**endpoint.sampling, "max_tokens": 4})
    time.sleep(0 if endpoint.sampling["temperature"] < 1 else 600)
    return "SELECT 1"
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which these rewards are installed."""
    site = tmp_path_factory.mktemp("site")
    info = site / "unsteady-1.0.dist-info"
    info.mkdir()
    (site / "unsteady.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unsteady\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[groundwire]\nunsteady = unsteady\n")
    kept = {name: value for name, value in os.environ.items() if name != "SPIDER_DATA_DIR"}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(site), kept.get("PYTHONPATH", "")])}


def _resumed(runs: Path, environment: Mapping[str, str], **settings: Any) -> tuple[RunDir, Any]:
    """A run of small steps, which a resumed one may have."""
    small = {"steps": 1, "tasks_per_step": 2, "group_size": 2, "val_tasks": 4, "n_runners": 8, "max_tokens": 8}
    if "backend" not in settings:
        small["agent_options"] = {"max_turns": 1}
    config = resolve("fast", **{**small, **settings})
    run = RunDir.create(str(runs), backend="langgraph", domain="spider", config=config.to_dict())
    return run, run_program("-m", "train.run", "--resume", str(run.path), environment=environment)


def _judged(**changes: Any) -> Rollout:
    return from_row({**REAL, "reward": 0.0, **changes})


def _failed(status: str = "reward", **changes: Any) -> Rollout:
    message = "the reward raised FileNotFoundError:\n gone"
    return from_row({**REAL, "mode": "train", "reward": None, "status": status, "message": message, **changes})


def test_the_first_failure_is_quoted_with_what_to_do() -> None:
    why = nothing_judged([_failed(mode="val"), _failed(mode="val", message="another")])
    assert why.startswith("none of 2 validation rollouts could be judged; the first failed of reward: ")
    assert "the reward raised FileNotFoundError: gone; fix the reward" in why
    assert "check the judge's endpoint" in nothing_judged([_failed("judge_abstained")])


def test_one_judged_rollout_is_enough_and_an_agents_own_failure_is_judged() -> None:
    assert nothing_judged([_failed(), _judged()]) == ""
    assert nothing_judged([_failed(), _failed("agent", reward=0.0)]) == ""
    assert nothing_judged([]) == ""


def test_a_step_without_a_success_is_reported_with_the_first_failure() -> None:
    broken = [_failed("agent", reward=0.0, message=f"KeyError: {n}") for n in range(3)]
    assert all_failed(broken).startswith("all 3 rollouts failed; the first failed of agent: KeyError: 0; repair the")
    assert all_failed([*broken, _judged()]) == all_failed([]) == ""


def test_failures_of_the_policy_may_pass_unless_all_are_the_same() -> None:
    same = [_failed("agent", reward=0.0, message=f"position {n}: no SQL") for n in range(3)]
    assert not is_transient(same)
    assert is_transient([*same, _failed("agent", reward=0.0, message="no SQL in 'I do not know'")])
    assert is_transient([*same, _failed("turn_limit", reward=0.0)])


def test_transient_failures_are_recognised() -> None:
    assert is_transient([_failed(), _failed("timeout")])
    assert not is_transient([_failed(), _failed("judge_abstained")])


def test_a_run_ends_if_the_reward_fails_for_most_answers_whatever_else_fails() -> None:
    judged = [_judged()] * 2
    why = lasting_failure([*judged, *[_failed()] * 3, _failed("timeout"), _failed("agent", reward=0.0)])
    assert why.startswith("3 of 5 rollouts have no reward; the first failed of reward: the reward raised FileNotFound")
    assert why.endswith("(groundwire audit tries it without a model); the other 2 would be a biased sample")
    assert "biased" not in lasting_failure([*[_failed()] * 2, _failed("timeout")])
    assert lasting_failure([*judged, *[_failed()] * 2, _failed("timeout")]) == ""
    assert lasting_failure([_failed(), *[_failed("timeout")] * 5]) == ""  # the next step may be in time
    assert lasting_failure([judged[0], *[_failed()] * 2, *[_failed("timeout")] * 9]) == ""
    assert lasting_failure([*judged, *[_failed("judge_abstained")] * 3]) == ""
    assert lasting_failure([*judged, *[_failed(reward=0.0)] * 3]) == ""  # as the setting failures says


def test_the_first_failure_of_each_type_is_noted_once() -> None:
    shown: list[str] = []
    notes = RolloutNotes(shown.append, run=Path("runs/r"))
    notes.show([_judged()])
    assert not shown
    notes.show([_judged(), _failed(), _failed(message="another")])
    [first] = shown
    assert first.startswith("2 of 3 rollouts failed (left out); the first failed of reward: the reward raised FileNot")
    assert first.endswith("audit tries it without a model). More: groundwire why runs/r")
    notes.show([_failed("agent", mode="val", reward=0.0, message="no SQL"), _failed()])
    [_, second] = shown
    assert second.startswith("1 of 2 validation rollouts failed (scored 0); the first failed of agent: no SQL; repair")
    notes.show([_failed(), _failed("agent")])
    assert shown == [first, second]


def test_a_run_whose_reward_always_fails_ends_before_training(tmp_path: Path, environment: dict[str, str]) -> None:
    run, done = _resumed(tmp_path, environment, reward="gone")
    assert done.returncode == 1
    assert "error: none of 4 validation rollouts could be judged" in done.stderr
    assert "FileNotFoundError: the grading service is gone; fix the reward" in done.stderr
    assert f"--resume {run.path}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "0.000" not in done.stdout + done.stderr
    assert run.metrics() == []


def test_a_run_whose_reward_fails_for_a_whole_step_ends_there(tmp_path: Path, environment: dict[str, str]) -> None:
    run, done = _resumed(tmp_path, environment, reward="later")
    assert done.returncode == 1
    assert "error: none of 4 rollouts could be judged; the first failed of reward" in done.stderr
    assert [line["step"] for line in run.metrics()] == [0]
    assert run.checkpoints.paths() == []


def test_a_run_whose_reward_fails_for_most_of_a_step_ends_with_a_checkpoint(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    run, done = _resumed(tmp_path, environment, reward="most", steps=2, val_every=0)
    assert done.returncode == 1
    assert "error: 3 of 4 rollouts have no reward; the first failed of reward: the reward raised " in done.stderr
    assert "ModuleNotFoundError: No module named 'a_package_that_is_missing'; fix the reward" in done.stderr
    assert "the other 1 would be a biased sample; the last checkpoint is of step 1" in done.stderr
    assert [line["step"] for line in run.metrics()] == [0, 1]
    assert run.checkpoints.last_step() == 1


def test_a_run_whose_rollouts_are_never_in_time_ends(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "slow_agent.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    run, done = _resumed(
        tmp_path,
        {**environment, "PYTHONPATH": path},
        **{"backend": "custom", "agent": "slow_agent:answer", "rollout_timeout_s": 15, "retries": 0, "steps": 9},
        val_temperature=0.5,
    )
    assert done.returncode == 1
    assert "error: none of 4 rollouts could be judged; the first failed of timeout" in done.stderr
    assert [line["step"] for line in run.metrics()] == [0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> tuple[RunDir, Any]:
    """A run whose reward fails for some questions, and whose validations are sampled."""
    settings = {"reward": "some", "tasks_per_step": 4, "val_tasks": 6, "val_temperature": 1.0}
    run, done = _resumed(tmp_path_factory.mktemp("finished"), environment, **settings)
    assert (done.returncode, "nothing was trained" in done.stdout) == (1, True), done.stderr
    return run, done


def test_a_run_whose_reward_sometimes_fails_counts_the_failures(finished: tuple[RunDir, Any]) -> None:
    before, after = finished[0].metrics()
    validated = before["validation_sampled"]
    assert validated["accuracy"] == 1.0
    assert 0 < validated["n"] < validated["total"] == 6
    assert validated["failures"] == {"reward": 6 - validated["n"]}
    assert 0 < after["failures"]["reward"] < after["rollouts"] == 8
    assert after["reward"] == 1.0


def test_the_reason_of_the_first_failure_is_shown_once(finished: tuple[RunDir, Any]) -> None:
    run, done = finished
    reason = "the first failed of reward: the reward raised FileNotFoundError: the grading service is gone; fix the"
    assert done.stdout.count(reason) == 1
    assert f"More: groundwire why {run.path}" in done.stdout


def test_a_validation_is_named_by_its_temperature(finished: tuple[RunDir, Any]) -> None:
    run, done = finished
    assert "sampled accuracy" in done.stdout
    assert "greedy" not in done.stdout
    assert all("validation" not in line and "validation_sampled" in line for line in run.metrics())
    names = sorted(path.name for path in (run.path / "rollouts").iterdir())
    assert names == ["step-00000-val-1.parquet", "step-00001-train.parquet", "step-00001-val-1.parquet"]


def test_an_evaluation_without_judged_rollouts_has_no_metrics(tmp_path: Path, environment: dict[str, str]) -> None:
    asked = (
        "-m",
        "train.evaluate",
        "--val-tasks",
        "6",
        "--n-runners",
        "6",
        "--agent-option",
        "max_turns=1",
        "--max-tokens",
        "8",
    )
    asked = (*asked, "--output-dir", str(tmp_path), "--reward")
    done = run_program(*asked, "gone", environment=environment)
    assert done.returncode == 1
    assert "error: none of 6 validation rollouts could be judged; the first failed of reward" in done.stderr
    assert not (tmp_path / "latest" / "evaluation.json").exists()
    done = run_program(*asked, "some", environment=environment)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "latest" / "evaluation.json").read_text())
    assert figures["accuracy"] == 1.0
    assert figures["failures"] == {"reward": 6 - figures["n"]}
    assert "FileNotFoundError: the grading service is gone" in done.stdout
    assert 0 < figures["n"] < 6


def test_markup_in_the_values_of_a_column_is_shown_as_text() -> None:
    validation = {"before": 0.1, "after": 0.2, "n": 4, "before_by_hardness": {"[/x] $1": 0.1}}
    summary = {"domain": "spider", "validation": validation, "validation_sampled": {}}
    out = io.StringIO()
    show_summary(
        Console(file=out, width=200), {**summary, "wall_time_s": 1, "peak_memory_mb": 1, "rollouts": 4}, "here"
    )
    assert "    [/x] $1: 0.100 before, - after\n" in out.getvalue()


def test_a_missing_accuracy_is_shown_as_a_dash_everywhere(tmp_path: Path) -> None:
    config = resolve("fast", steps=1)
    run = RunDir.create(str(tmp_path), backend="langgraph", domain="spider", config=config.to_dict())
    judged = {"accuracy": 0.25, "ci95": [0.1, 0.5], "n": 8, "total": 8, "by_subject_split": {"new": {"accuracy": 0.25}}}
    nothing = {"accuracy": None, "ci95": [0.0, 1.0], "n": 0, "total": 8, "failures": {"timeout": 8}}
    seconds = dict.fromkeys(("update", "sampling", "sql", "reward", "agent", "waiting"), 0.0)
    step = {"step": 1, "reward": None, "rollouts": 4, "failures": {"timeout": 4}, "seconds": seconds}
    lines: list[dict[str, Any]] = [{"step": 0, "validation": judged, "wall_time_s": 1.0}]
    lines.append({**step, "validation": nothing, "wall_time_s": 2.0})
    out = io.StringIO()
    console = Console(file=out, width=200)
    display = ProgressDisplay(console, 1)
    for line in lines:
        run.append_metrics(line)
        display.on_step_end(line)
    summary = summarize(run, config, "data")
    show_summary(console, summary, "here")
    assert summary["validation"]["after"] is None
    assert "greedy accuracy - [0.00, 1.00] of 0" in out.getvalue()
    assert "greedy: 0.250 before, - after on 8 validation questions" in out.getvalue()
    assert "new subjects: 0.250 before, - after" in out.getvalue()
    report = build(run)
    assert "0.250 → -" in report.html
    assert [list(each.points) for each in report.charts[0].series] == [[(0, 0.25)]]
    draw_curve(run.metrics(), tmp_path / "curve.png")

    figures = compute_metrics([_failed(mode="val")])
    assert (figures["accuracy"], figures["calls_per_rollout"], figures["n"]) == (None, None, 0)
    assert details(figures).startswith("accuracy - [0.000, 1.000] of 0 questions")
    entry = {"model": "m", "context": 1, "max_turns": 2, "agents": "a", "before": None, "after": figures}
    assert table([entry], "markdown").splitlines()[-1] == "| m | 1 | 2 | a | - | - | - | - | - |"
