"""Rescoring shows what another reward changes for the trainer; failures stay failures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from groundwire.rewards import RewardError
from groundwire.rewards._sql import training
from groundwire.tools.types import AgentStep
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.rescore import app, rescore
from groundwire.train.store.rollout import Outcome, Rollout

RAN = AgentStep(agent="a", kind="tool", input="SELECT 1", output="[(1,)]", ok=True)


def rollout(
    answer: str, reward: float | None, *, group: str = "g", mode: str = "train", step: int = 1, ran: bool = True
) -> Rollout:
    failure = "timeout" if reward is None else ""
    return Rollout(
        step=step,
        mode=mode,  # type: ignore[arg-type]
        group=group,
        task={"id": group, "question": f"What of {group}?", "gold": "yes"},
        outcome=Outcome(answer=answer, reward=reward, failure=failure, steps=[RAN] if ran else []),
    )


async def says_yes(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
    if answer == "unclear":
        raise RewardError("no verdict")
    return float(answer == task["gold"])


async def test_groups_gain_and_lose_their_gradient() -> None:
    rows = [rollout("yes", 0.0), rollout("no", 0.0)]
    rows += [rollout("yes", 1.0, group="h"), rollout("yes", 0.0, group="h")]
    rows += [rollout("no", 0.0, group="i"), rollout("no", 0.0, group="i")]
    groups = {group.group: group for group in (await rescore(rows, says_yes)).groups}
    assert [(groups[name].had_gradient, groups[name].has_gradient) for name in "ghi"] == [
        (False, True),
        (True, False),
        (False, False),
    ]
    assert (groups["g"].old, groups["g"].new) == ([0.0, 0.0], [1.0, 0.0])


async def test_a_group_is_a_task_in_one_step_and_validation_has_none() -> None:
    rows = [rollout("yes", 1.0), rollout("no", 0.0, step=2), rollout("no", 0.0, mode="val")]
    found = await rescore(rows, says_yes)
    assert [(group.step, len(group.old)) for group in found.groups] == [(1, 1), (2, 1)]
    assert len(found.rollouts) == 3


async def test_rollouts_of_training_are_judged_as_in_training() -> None:
    async def strict(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
        return 0.0 if training() else 1.0

    found = await rescore([rollout("yes", 1.0), rollout("yes", 1.0, mode="val")], strict)
    assert [each.new for each in found.rollouts] == [0.0, 1.0]


async def test_a_single_rollout_is_compared_with_0() -> None:
    rows = [rollout("yes", 0.0), rollout("no", 1.0, group="h"), rollout("unclear", 1.0, group="i")]
    groups = (await rescore(rows, says_yes)).groups
    assert [(group.had_gradient, group.has_gradient) for group in groups] == [
        (False, True),
        (True, False),
        (True, False),
    ]


async def test_answers_flip_in_both_directions() -> None:
    found = await rescore([rollout("yes", 0.5), rollout("no", 0.9), rollout("yes", 0.6)], says_yes)
    assert [each.flips for each in found.rollouts] == [True, True, False]


async def test_failures_stay_and_a_rollout_that_cannot_be_judged_leaves_its_group() -> None:
    rows = [rollout("", None), rollout("unclear", 0.0), rollout("yes", 1.0), rollout("no", 0.0)]
    found = await rescore(rows, says_yes)
    assert found.failed == 1
    assert [(each.new, each.error) for each in found.rollouts] == [(None, "no verdict"), (1.0, ""), (0.0, "")]
    assert (found.groups[0].old, found.groups[0].new) == ([0.0, 1.0, 0.0], [1.0, 0.0])


async def test_the_new_reward_gets_the_agents_steps() -> None:
    async def executes(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
        return float(any(step["ok"] for step in steps))

    found = await rescore([rollout("a", 0.0), rollout("b", 0.0, ran=False)], executes)
    assert [each.new for each in found.rollouts] == [1.0, 0.0]


# -- the command


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, backend="b", domain="d", config={})
    for step in (1, 2):
        run.write_rollouts(step, [rollout("a", 0.0, step=step), rollout("b", 0.0, step=step, ran=False)])
    return run


def command(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_an_unfinished_run_is_rescored_and_the_json_is_complete(run: RunDir, tmp_path: Path) -> None:
    code, printed, _ = command(str(run.path), "--reward", "executes", "--json", str(tmp_path / "rescored.json"))
    assert code == 0
    assert "groups with a gradient: 0 of 2 in the run, 2 now" in printed
    assert "2 wrong to right" in printed
    report = json.loads((tmp_path / "rescored.json").read_text())
    assert (report["groups_gain"], report["groups_lose"], report["to_right"], report["to_wrong"]) == (2, 0, 2, 0)
    assert [each["new"] for each in report["rollouts"]] == [1.0, 0.0, 1.0, 0.0]
    assert [each["has_gradient"] for each in report["groups"]] == [True, True]


def test_a_damaged_file_is_left_out_and_named(run: RunDir) -> None:
    part = run.path / "rollouts" / "step-00002-train.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    code, printed, stderr = command(str(run.path), "--reward", "executes")
    assert code == 0
    assert "groups with a gradient: 0 of 1 in the run, 1 now" in printed
    assert stderr.startswith("left out: step-00002-train.parquet cannot be read")


def test_user_errors_are_one_line(tmp_path: Path) -> None:
    fresh = RunDir.create(tmp_path, backend="b", domain="d", config={}).path
    for folder, reward, message in (
        (fresh, "executes", "has not finished a step"),
        (fresh, "nope", "unknown reward 'nope'"),
        (tmp_path / "nowhere", "executes", "is not a run"),
    ):
        code, _, stderr = command(str(folder), "--reward", reward)
        assert code == 2
        assert message in stderr
        assert len(stderr.strip().splitlines()) == 1
