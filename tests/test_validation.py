"""Accuracy counts what the agent answered; what the infrastructure broke is counted apart."""

from __future__ import annotations

from typing import Any

import pytest

from groundwire.train.evaluation.validation import accuracy, choose_tasks, validation_jobs, validation_name, wilson
from groundwire.train.rollouts.outcome import RolloutRequest, RolloutResult


def _outcome(reward: float | None, status: str = "succeeded", **task: Any) -> RolloutResult:
    return RolloutResult(
        request=RolloutRequest(task={"id": "1", "question": "?", **task}, group="1", mode="val"),
        rollout_id="ro",
        status=status,
        reward=reward,
        reward_components={},
        message="",
        answer="",
        steps=[],
        calls=[],
        attempts=1,
        seconds=0.1,
    )


def test_accuracy_is_told_overall_and_by_hardness_and_subject() -> None:
    result = accuracy(
        [
            _outcome(1.0, hardness="easy", subject_split="new"),
            _outcome(0.0, hardness="easy", subject_split="familiar"),
            _outcome(1.0, hardness="hard", subject_split="new"),
        ]
    )
    assert result["accuracy"] == pytest.approx(2 / 3, abs=1e-4)
    assert result["by_hardness"] == {"easy": 0.5, "hard": 1.0}
    assert result["by_subject_split"] == {"familiar": 0.0, "new": 1.0}


def test_a_broken_infrastructure_changes_no_accuracy() -> None:
    result = accuracy([_outcome(1.0), _outcome(None, "endpoint"), _outcome(None, "timeout")])
    assert (result["accuracy"], result["n"]) == (1.0, 1)
    assert result["failures"] == {"endpoint": 1, "timeout": 1}


def test_of_nothing_judged_there_is_no_accuracy() -> None:
    result = accuracy([_outcome(None, "reward"), _outcome(None, "judge_abstained")])
    assert (result["accuracy"], result["n"], result["total"]) == (None, 0, 2)


def test_an_agent_that_gives_up_is_wrong() -> None:
    result = accuracy([_outcome(1.0), _outcome(None, "prompt_too_long")])
    assert (result["accuracy"], result["n"]) == (0.5, 2)


def test_the_interval_is_wilsons() -> None:
    # Newcombe 1998, table I: 15 of 148 and 0 of 20.
    assert wilson(15, 148) == pytest.approx([0.0624, 0.1605], abs=2e-4)
    assert wilson(0, 20) == pytest.approx([0.0, 0.1611], abs=2e-4)


def test_every_run_judges_the_same_questions_spread_over_all_databases() -> None:
    tasks = [{"id": str(i), "question": "?"} for i in range(100)]
    chosen = choose_tasks(tasks, 10)
    assert chosen == choose_tasks(tasks, 10)
    assert [int(t["id"]) // 10 for t in chosen] == list(range(10))
    assert choose_tasks(tasks, 0) == tasks
    assert choose_tasks(tasks, 1000) == tasks


def test_greedy_is_temperature_zero() -> None:
    [job] = validation_jobs([{"id": "1", "question": "?"}], temperature=0.0, max_tokens=5, seed=0)
    assert job.sampling["temperature"] == 0.0
    assert job.mode == "val"
    assert [validation_name(each) for each in (0.0, 0.7, 1.0)] == ["validation", *["validation_sampled"] * 2]


def test_rewards_that_are_no_proportion_get_the_interval_of_their_mean() -> None:
    result = accuracy([_outcome(reward) for reward in (1.1, 1.1, 0.3, 0.9)])
    assert result["accuracy"] == 0.85
    assert result["ci95"] == [0.479, 1.221]
    assert accuracy([_outcome(1.1)])["ci95"] == [1.1, 1.1]
