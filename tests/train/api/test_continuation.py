"""A run goes on with the same reward, agent and validation tasks; what else has changed is said and stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from spider_folder import make_spider

from groundwire.train.api.resume import store_settings
from groundwire.train.api.training import _stored_config, make_job
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.evaluation.run_reader import settings_changes
from groundwire.train.job.job import Job, parse_arguments

TASKS = [{"question": f"What is {number} + 1?", "expected": str(number + 1)} for number in range(20)]


async def agent(task: Any) -> str:
    return str(task.question)


async def other_agent(task: Any) -> str:
    return str(task.question)


def reward(task: Mapping[str, Any], answer: str) -> float:
    return float(task["expected"] == answer)


def other_reward(task: Mapping[str, Any], answer: str) -> float:
    return 1.0


def _job(
    run: RunDir | None = None,
    agent: Any = agent,
    tasks: Sequence[Mapping[str, Any]] = TASKS,
    reward: Callable[..., Any] = reward,
    **settings: Any,
) -> Job:
    given, objects = parse_arguments(agent, tasks, reward, settings)
    return make_job(given, resumed=run, objects=objects)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with one step."""
    run = RunDir.create(tmp_path, backend="custom", domain="tasks", config=_stored_config(_job()))
    with run.checkpoints.write(1):
        pass
    return run


def _said(job: Job) -> list[str]:
    return [note for note in job.notes if note.startswith("resume")]


def test_the_same_run_goes_on_without_a_word(run: RunDir) -> None:
    job = _job(run, device="cpu", n_runners=3, steps=50)
    assert not _said(job)
    store_settings(run, job)
    assert (run.config()["steps"], settings_changes(run)) == (50, [])


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"reward": other_reward}, "the reward is test_continuation:other_reward, and it was test_continuation:reward"),
        ({"agent": other_agent}, "the agent is test_continuation:other_agent, and it was test_continuation:agent"),
        ({"tasks": [{**task, "question": f"{task['question']}!"} for task in TASKS]}, "its validation tasks are not"),
        ({"tasks": [{**task, "expected": "0"} for task in TASKS]}, "its validation tasks are not the same any more"),
    ],
)
def test_what_would_make_before_and_after_incomparable_is_refused(
    changed: dict[str, Any], problem: str, run: RunDir
) -> None:
    with pytest.raises(ConfigError, match=rf"cannot be resumed: {problem}.* start a new run with its model"):
        _job(run, **changed)


def test_the_data_that_an_environment_variable_names_is_the_runs(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPIDER_DATA_DIR", str(make_spider(tmp_path / "spider")))
    job = make_job({"backend": "langgraph"})
    assert job.config.data_dir == str(tmp_path / "spider")
    run.write_config(_stored_config(job))
    monkeypatch.setenv("SPIDER_DATA_DIR", str(tmp_path / "nowhere"))
    assert make_job({}, resumed=run).data.source.startswith(f"--data-dir {tmp_path / 'spider'}: ")
    monkeypatch.setenv("SPIDER_DATA_DIR", str(tmp_path / "spider"))
    run.write_config({**_stored_config(make_job({"backend": "langgraph"})), "data_dir": None})
    monkeypatch.delenv("SPIDER_DATA_DIR")
    with pytest.raises(ConfigError, match="its validation tasks are not the same any more"):
        make_job({}, resumed=run)  # the bundled data


def test_changed_settings_are_said_and_stored_for_each_part_of_the_run(run: RunDir) -> None:
    job = _job(run, group_size=4, max_tokens=7)
    assert _said(job) == [
        "resume: changed after step 1: group_size 4 (was 8), max_tokens 7 (was 64)",
        "resume: that changes what validation measures, so before and after may not be comparable",
    ]
    store_settings(run, job)
    assert [run.config(step)["group_size"] for step in (1, 2)] == [8, 4]
    assert not _said(_job(run))  # the next resume goes on with them
    assert len(_said(_job(run, judge={"model": "m"}, learning_rate=1e-5, max_tokens=7))) == 2
    assert len(_said(_job(run, learning_rate=1e-5))) == 1
    assert settings_changes(run) == [
        "after step 1 the run was resumed with group_size 4 (was 8), max_tokens 7 (was 64)"
    ]


def test_other_training_tasks_and_another_code_of_the_same_name_are_said(run: RunDir) -> None:
    def lenient(task: Mapping[str, Any], answer: str) -> float:
        return float(task["expected"] in answer)

    lenient.__qualname__ = "reward"
    data = _job().data
    given, objects = parse_arguments(agent, data.train[1:], lenient, {}, validation=data.validation)
    job = make_job(given, resumed=run, objects=objects)
    assert _said(job) == [
        "resume: changed after step 1: another source code of the reward, other training tasks",
        "resume: that changes what validation measures, so before and after may not be comparable",
    ]
    store_settings(run, job)
    assert settings_changes(run) == [
        "after step 1 the run was resumed with another source code of the reward, other training tasks"
    ]


def test_a_run_with_verl_is_continued_by_the_same_rules(tmp_path: Path) -> None:
    job = make_job({"trainer": "verl", "config": "starter"})
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=_stored_config(job))
    run.checkpoints.folder.mkdir()
    (run.checkpoints.folder / "latest_checkpointed_iteration.txt").write_text("5")
    changed = make_job({"group_size": 4, "verl": {"data.shuffle": True}}, resumed=run)
    assert _said(changed) == ["resume: changed after step 5: group_size 4 (was 8), verl.data.shuffle True (was None)"]
    store_settings(run, changed)
    assert [run.config(step)["group_size"] for step in (5, 6)] == [8, 4]
    with pytest.raises(ConfigError, match="the reward is executes, and it was spider_exec_match"):
        make_job({"reward": "executes"}, resumed=run)


def test_a_run_with_a_setting_that_is_gone_can_be_resumed_if_it_was_off(run: RunDir) -> None:
    file = run.path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "further_rollouts": 0}))
    assert _job(run).config.steps == config["steps"]
    file.write_text(json.dumps({**config, "further_rollouts": 4}))
    with pytest.raises(RunDamagedError, match="the unknown setting 'further_rollouts'"):
        _job(run)
