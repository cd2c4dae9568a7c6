"""Dynamic sampling replaces groups with equal rewards; resuming repeats it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from jobs import job_of
from no_data import NoData

from groundwire.adapters import Answer, Endpoint, Question
from groundwire.domains import TaskData
from groundwire.train.algorithms.task_schedule import TaskSchedule
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.local.trainer import LocalTrainer
from groundwire.train.policy.pretrained.model_files import save_policy

TASKS = [{"id": f"t{number:02}", "question": f"Question {number}?"} for number in range(20)]
SMALL = {"steps": 3, "tasks_per_step": 3, "group_size": 2, "max_tokens": 1, "val_tasks": 1, "val_temperature": 1.0}


class _OneCall:
    """Asks the policy for one token; the answer is the seed of the rollout."""

    agents = ("solo",)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        body = {"messages": [{"role": "user", "content": question.text}], **endpoint.sampling}
        async with aiohttp.ClientSession(headers=endpoint.agent_headers("solo")) as session:
            await (await session.post(f"{endpoint.base_url}/chat/completions", json=body)).read()
        return Answer(text=str(endpoint.sampling.get("seed", 0)))


async def _every_third_task_differs(task: Any, answer: str, steps: Any) -> float:
    """The rewards of a group are its seeds if the task's number is divisible by 3, else all 1."""
    return 1.0 if int(task["id"][1:]) % 3 else int(answer) % 1009 / 1009


class _Stop(Exception):
    pass


class _StopAfter(ProgressCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] == self.step:
            raise _Stop


@pytest.fixture(scope="module")
def model(tiny_policy: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small model."""
    folder = tmp_path_factory.mktemp("model")
    save_policy(*tiny_policy, folder)
    return str(folder)


def _train(folder: Path, *, stop_after: int | None = None, **settings: Any) -> RunDir:
    """Train in ``folder``, from its last checkpoint if it has one."""
    config = resolve("fast", **{**SMALL, **settings})
    folder.mkdir(exist_ok=True)
    run = RunDir(folder)
    run.write_config(config.to_dict())
    data = TaskData(train=TASKS, validation=TASKS[:1], source="test")
    job = job_of(config, NoData(), data, backend=_OneCall(), reward=_every_third_task_differs)
    LocalTrainer(job, run=run, callback=_StopAfter(stop_after)).train()
    return run


def _sampled(run: RunDir) -> list[list[tuple[str, float]]]:
    """The task and reward of the training rollouts of each step."""
    trained = [rollout for rollout in run.rollouts()[0] if rollout.mode == "train"]
    return [
        [(str(rollout.task["id"]), rollout.outcome.reward or 0.0) for rollout in trained if rollout.step == step]
        for step in sorted({rollout.step for rollout in trained})
    ]


def test_groups_with_equal_rewards_are_replaced_within_the_budget(tmp_path: Path, model: str) -> None:
    lines = _train(tmp_path, model=model, sampling_budget=6).metrics()[1:]
    for line, sampled in zip(lines, _sampled(RunDir(tmp_path)), strict=True):
        sizes = Counter(task for task, _ in sampled)
        assert set(sizes.values()) == {2}  # complete groups, each of another task
        assert line["groups_used"] >= 3
        assert line["rollouts"] == 2 * line["groups"] == len(sampled)
        assert line["rollouts_trained"] == 2 * line["groups_used"]
        assert line["tokens_generated"] == line["rollouts"]
        assert line["tokens_trained"] == line["rollouts_trained"]
    assert lines[0]["groups_used"] == 3  # the first step has no share of earlier ones: not one group too many


def test_the_budget_ends_a_step_without_enough_groups(tmp_path: Path, model: str) -> None:
    lines = _train(tmp_path, model=model, sampling_budget=2, tasks_per_step=8, steps=1).metrics()
    assert lines[1]["groups"] == 16
    assert 0 < lines[1]["groups_used"] < 8


def test_a_group_whose_replies_are_all_masked_teaches_nothing_either(tmp_path: Path, model: str) -> None:
    # Each reply is cut after its only token, so no group has a gradient, whatever its rewards.
    line = _train(tmp_path, model=model, sampling_budget=2, steps=1, truncated="mask").metrics()[1]
    assert (line["groups"], line["groups_used"]) == (6, 0)


def test_a_resumed_run_samples_the_same_rollouts(tmp_path: Path, model: str) -> None:
    settings: dict[str, Any] = {"model": model, "sampling_budget": 2}
    whole = _sampled(_train(tmp_path / "whole", **settings))
    with pytest.raises(_Stop):
        _train(tmp_path / "stopped", stop_after=2, **settings)
    assert _sampled(_train(tmp_path / "stopped", **settings)) == whole
    assert len(whole) == 3


def test_without_a_budget_the_tasks_of_a_step_are_as_before() -> None:
    def ids(step: int, **settings: Any) -> list[str]:
        groups = TaskSchedule(TASKS, RunConfig(tasks_per_step=6, group_size=2, **settings)).groups(step)
        return [str(group[0].task["id"]) for group in groups]

    assert ids(1) == ["t04", "t06", "t19", "t11", "t08", "t05"]
    assert ids(4) == ["t06", "t03", "t17", "t02", "t07", "t16"]
    assert ids(1, sampling_budget=2)[:6] == ids(1)
    assert len(set(ids(1, sampling_budget=2))) == 12
    assert sorted(ids(1, sampling_budget=100)) == [task["id"] for task in TASKS]


def test_a_trainer_that_draws_one_task_at_a_time_trains_on_the_same_tasks() -> None:
    config = RunConfig(tasks_per_step=6, group_size=2, sampling_budget=2)
    schedule = TaskSchedule(TASKS, config)
    for step in (1, 2, 1):
        drawn = [schedule.draw(step)["id"] for _ in range(schedule.most)]
        assert drawn == [group[0].task["id"] for group in TaskSchedule(TASKS, config).groups(step)]
        assert len(set(drawn)) == schedule.most == 12
    for _ in range(len(TASKS) - schedule.most):
        schedule.draw(1)
    assert schedule.draw(1)["id"] == drawn[0]  # after the last the first again
