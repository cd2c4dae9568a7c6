"""A failure that the policy caused scores the least reward of the run: nothing is better than a wrong answer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from bandits import Choose, evaluate, rollouts, train

from groundwire import rewards
from groundwire.adapters import AgentError
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.rollouts.outcome import FailureScores, final_outcome
from groundwire.train.store.rollout import Outcome, Rollout


async def _raises_at_0(choose: Choose) -> str:
    if (digit := await choose("select a name", "01")) == "0":
        raise AgentError("the reply has no query")
    return digit


def _result(status: str, reward: float | None = None, *, least: float = 0.0) -> Rollout:
    failure = "" if status == "succeeded" else status
    outcome = Outcome(failure=failure, reward=reward, least_reward=least)
    return Rollout(task={"id": "1", "question": "?"}, group="1", outcome=outcome)


def _rewards(scores: FailureScores, *results: Rollout) -> list[float | None]:
    scores.settle(results)
    return [result.outcome.reward for result in results]


def test_a_failure_of_the_policy_scores_the_least_reward_so_far_and_0_if_none_is_lower() -> None:
    scores = FailureScores()
    assert _rewards(scores, _result("succeeded", 0.5), _result("agent"), _result("tool")) == [0.5, 0.0, None]
    assert _rewards(scores, _result("turn_limit"), _result("succeeded", -1.0)) == [-1.0, -1.0]
    assert _rewards(scores, _result("agent"), _result("succeeded", 1.0)) == [-1.0, 1.0]


def test_a_failure_scores_the_least_reward_that_the_reward_declares_before_it_gives_it() -> None:
    assert _rewards(FailureScores(), _result("agent", least=-2.0), _result("agent")) == [-2.0, -2.0]


def test_a_number_can_be_given_and_is_no_reward_of_the_run() -> None:
    scores = FailureScores("agent=-3,timeout=zero")
    assert _rewards(scores, _result("agent"), _result("timeout"), _result("succeeded", 1.0)) == [-3.0, 0.0, 1.0]


def test_a_run_that_goes_on_knows_the_least_reward_of_its_first_part(tmp_path: Path, tiny_policy: Any) -> None:
    settings = {"val_tasks": 16, "val_temperature": 1.0, "retries": 0}
    run = train(tmp_path, tiny_policy, _raises_at_0, lambda answer: -0.5, **settings)
    assert {one.outcome.reward for one in run.rollouts()[0]} == {-0.5}
    assert FailureScores("", RunDir(run.path)).least == -0.5


def test_an_agent_that_crashes_is_not_reinforced_where_rewards_are_negative(tmp_path: Path, tiny_policy: Any) -> None:
    settings = {"steps": 3, "val_tasks": 16, "val_temperature": 1.0, "retries": 0, "credit": "broadcast"}
    run = train(tmp_path, tiny_policy, _raises_at_0, lambda answer: -1.0, **settings)
    assert {one.outcome.reward for one in rollouts(run)} == {-1.0}
    assert run.metrics()[0]["validation_sampled"]["accuracy"] == -1.0


def test_an_answer_that_the_reward_cannot_read_is_wrong_once_it_has_read_another(
    tmp_path: Path, tiny_policy: Any
) -> None:
    async def agent(choose: Choose) -> str:
        return {"0": "none", "1": "1"}[await choose("select a name", "01")]

    settings = {"val_tasks": 16, "val_temperature": 1.0, "retries": 1}
    metrics = evaluate(tmp_path, tiny_policy, agent, float, **settings)
    unreadable = metrics["failures"]["unreadable_answer"]
    assert 0 < unreadable < 16
    assert (metrics["accuracy"], metrics["n"]) == (1 - unreadable / 16, 16)
    assert "could not convert string to float" in metrics["failure_messages"]["unreadable_answer"]


def test_a_reward_that_has_read_no_answer_yet_is_what_fails() -> None:
    scores = FailureScores()
    failed = _result("unreadable_answer")
    scores.settle([failed])
    assert (failed.outcome.status, failed.outcome.reward) == ("reward", None)
    assert _rewards(scores, _result("unreadable_answer"), _result("succeeded", 1.0)) == [0.0, 1.0]
    assert (failed.outcome.status, failed.outcome.reward) == ("unreadable_answer", 0.0)


def test_a_reply_that_was_cut_off_is_trained_with_the_least_reward_of_the_run(tmp_path: Path, tiny_policy: Any) -> None:
    async def agent(choose: Choose) -> str:
        return await choose("select a name", "01")

    given = itertools.chain([-2.0], itertools.repeat(1.0))  # the first is of the validation
    settings = {"truncated": "zero", "max_tokens": 1, "val_temperature": 1.0}
    trained = rollouts(train(tmp_path, tiny_policy, agent, lambda answer: next(given), **settings))
    assert {one.outcome.reward for one in trained} == {1.0}
    assert {call.credit and call.credit.returns for one in trained for call in one.calls} == {-2.0}


def test_an_unreachable_service_of_a_reward_is_no_wrong_answer(tmp_path: Path, tiny_policy: Any) -> None:
    async def agent(choose: Choose) -> str:
        return await choose("select a name", "01")

    def reward(answer: str) -> float:
        if answer == "1":
            return 1.0
        try:
            raise ConnectionRefusedError("the grader")
        except OSError as error:
            raise ValueError("no grade") from error

    metrics = evaluate(tmp_path, tiny_policy, agent, reward, val_tasks=16, val_temperature=1.0, retries=0)
    assert set(metrics["failures"]) == {"reward"}
    assert metrics["accuracy"] == 1.0


def test_a_failed_rollout_whose_calls_were_lost_has_no_reward() -> None:
    for lost, expected in (("", ("agent", 0.0)), ("the store is full", ("not_stored", None))):
        result = _result("agent")
        result.outcome = final_outcome(result, not_stored=lost)
        FailureScores().settle([result])
        assert (result.outcome.status, result.outcome.reward) == expected


def test_the_range_of_a_sum_is_the_sum_of_its_terms() -> None:
    async def signed(task: Any, answer: str, steps: Any) -> float:
        return -1.0

    signed.reward_range = (-1, 1)  # type: ignore[attr-defined]
    summed = rewards._registry.combine([(0.5, "signed", signed), (-0.25, "executes", rewards.get("executes"))])
    assert rewards.declared_range(summed) == (-0.75, 0.5)
    assert rewards.declared_range(rewards.reward_function(lambda task, answer: 1.0)) == (0.0, 1.0)


@pytest.mark.parametrize("given", [(1, -1), 3, (0, float("nan")), ("a", "b"), (-1e308, 0)])
def test_a_range_that_is_none_is_refused(given: Any) -> None:
    def reward(task: Any, answer: str) -> float:
        return 0.0

    reward.reward_range = given  # type: ignore[attr-defined]
    with pytest.raises(rewards.UnusableRewardError, match="reward_range is"):
        rewards.reward_function(reward)
