"""A row of ``rollouts.parquet`` is the rollout again, with what each call was trained with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from groundwire.adapters.tracing import CallCredit, LLMCall
from groundwire.train.store.rollout import Attempt, Outcome, Rollout
from groundwire.train.store.rows import from_row, row_error, to_row

CALL = LLMCall(
    rollout_id="r", attempt_id="a", sequence=3, agent="write", prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5],
    finish_reason="stop", weights_version=4, reward=0.25, credit=CallCredit(1.25, -0.5, 1.0),
)  # fmt: skip
FAILED = LLMCall(rollout_id="r", attempt_id="a", sequence=5, status=500, error="it broke", prompt_tokens=7)
ROLLOUT = Rollout(
    rollout_id="r",
    task={"id": "t", "question": "?"},
    group="t",
    step=6,
    sampling={"temperature": 0.5},
    status="succeeded",
    ended=2.5,
    attempts=[Attempt(number=2, started=0.0)],
    outcome=Outcome(
        answer="42", reward=1.0, reward_components={"match": 1.0}, query_scores=[0.0], steps=[], message="m"
    ),
    calls=[CALL, FAILED],
)


def test_a_rollout_is_read_back_as_it_was_written() -> None:
    read = from_row(to_row(ROLLOUT))
    assert read.outcome == ROLLOUT.outcome
    assert (read.rollout_id, read.task, read.group, read.step, read.mode) == ("r", ROLLOUT.task, "t", 6, "train")
    assert (read.seconds, read.attempt and read.attempt.number, read.sampling) == (2.5, 2, {"temperature": 0.5})
    [call] = read.trainable_calls
    assert (call.prompt_ids, call.response_ids, call.logprobs) == ([1, 2], [3], [-0.5])
    assert (call.reward, call.credit, call.agent, call.weights_version) == (0.25, CALL.credit, "write", 4)
    [failed] = read.untrainable_calls
    assert failed.untrainable_reason == FAILED.untrainable_reason
    assert failed.prompt_tokens == 7


def test_a_failure_is_read_back_with_its_score() -> None:
    read = from_row(to_row(replace(ROLLOUT, outcome=Outcome(failure="agent", message="no query", reward=0.0))))
    assert (read.outcome.status, read.outcome.reward, read.succeeded) == ("agent", 0.0, False)


def test_a_row_may_lack_columns() -> None:
    assert from_row({"rollout_id": "r", "task_id": "t", "reward": None}).task == {"id": "t"}


@pytest.mark.parametrize(
    "changed", [{"reward": 1e308}, {"reward_components": {"a": 1e308}}, {"query_scores": [-1e308]}]
)
def test_a_row_with_a_reward_that_no_sum_can_hold_is_damaged(changed: dict[str, Any]) -> None:
    assert row_error([to_row(ROLLOUT)]) == ""
    row = to_row(replace(ROLLOUT, outcome=replace(ROLLOUT.outcome, **changed)))
    assert "1e+308: it must be " in row_error([row])


def test_a_row_that_somebody_else_wrote_has_a_task_and_no_half_of_a_credit() -> None:
    call = {"agent": None, "prompt_ids": [1], "response_ids": [2], "logprobs": [0.0], "weight": 1.0, "returns": None}
    read = from_row({"task_id": "t", "task": '{"question": "?"}', "calls": [call]})
    assert read.task == {"id": "t", "question": "?"}
    assert read.calls[0].credit is None
