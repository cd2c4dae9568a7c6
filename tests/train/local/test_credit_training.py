"""Credit per call, learnt by the real trainer and engine: bandits of two calls."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from agentlightning.emitter import emit_reward
from bandits import Choose, probability, rollouts, train

from groundwire.train.evaluation import ProgressCallback
from groundwire.train.local.grpo import GRPO
from groundwire.train.local.packing import WeightedItem

FAST: dict[str, Any] = {"steps": 2, "warmup_steps": 1, "learning_rate": 5e-4, "group_size": 24}


async def _rewarded_in_the_middle(choose: Choose) -> str:
    first = await choose("select name", "01")
    emit_reward(0.5 if first == "1" else 0.0)
    return first + await choose("count", "23")


@pytest.mark.parametrize("credit", ["turns", "broadcast"])
def test_a_reward_of_the_first_call_is_learnt_with_turns(tmp_path: Path, tiny_policy: Any, credit: str) -> None:
    def last_digit(answer: str) -> float:
        return float(answer[1] == "3")

    run = train(tmp_path, tiny_policy, _rewarded_in_the_middle, last_digit, **FAST, credit=credit)
    assert probability(run, 1, "3") > 0.7
    assert (probability(run, 0, "1") > 0.8) == (credit == "turns")


async def _second_does_not_matter(choose: Choose) -> str:
    first = await choose("select name", "01")
    return first + await choose(f"count {first}", "23")


def test_with_turns_luck_in_a_call_after_the_decision_has_no_effect(tmp_path: Path, tiny_policy: Any) -> None:
    """All that read the same prompt have equal returns. With broadcast two seeds differ by 0.05 to 0.3."""
    runs = [
        train(
            tmp_path / str(seed), tiny_policy, _second_does_not_matter, lambda answer: float(answer[0] == "1"),
            **FAST, credit="turns", seed=seed,
        )
        for seed in (0, 1)
    ]  # fmt: skip
    assert all(probability(run, 0, "1") > 0.8 for run in runs)
    first, second = (probability(run, 1, "3") for run in runs)
    assert abs(first - second) < 0.03


def test_the_credit_that_was_trained_is_recorded_with_each_call(
    tmp_path: Path, tiny_policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, minibatch = defaultdict[tuple[tuple[int, ...], tuple[int, ...]], set[float]](set), GRPO._minibatch

    def record(self: GRPO, items: list[WeightedItem], *arguments: Any) -> None:
        for item in items:
            for call in item.trajectory.calls:
                start = len(call.prompt_ids) - len(item.trajectory.prompt_ids)
                trained[tuple(call.prompt_ids), tuple(call.response_ids)].add(item.advantages[start])
        minibatch(self, items, *arguments)

    monkeypatch.setattr(GRPO, "_minibatch", record)
    run = train(
        tmp_path, tiny_policy, _rewarded_in_the_middle, lambda answer: float(answer[1] == "3"),
        credit="turns", credit_discount=0.5, loss="dr-grpo", call_cost=0.1,
    )  # fmt: skip
    recorded = defaultdict[tuple[tuple[int, ...], tuple[int, ...]], set[float]](set)
    for call in (call for rollout in rollouts(run) for call in rollout.calls):
        assert call.credit is not None
        recorded[tuple(call.prompt_ids), tuple(call.response_ids)].add(call.credit.weight * call.credit.advantage)
    assert trained
    assert recorded == trained
    validated = [rollout for rollout in run.rollouts()[0] if rollout.mode == "val"]
    assert not any(call.credit for rollout in validated for call in rollout.calls)


async def _one_call(choose: Choose) -> str:
    return await choose("select name", "01")


@pytest.mark.parametrize(("agent", "notes"), [(_second_does_not_matter, 1), (_one_call, 0)])
def test_last_says_once_that_the_other_calls_of_an_agent_are_not_trained(
    tmp_path: Path, tiny_policy: Any, monkeypatch: pytest.MonkeyPatch, agent: Any, notes: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(ProgressCallback, "on_note", lambda _, text: said.append(text))
    train(
        tmp_path, tiny_policy, agent, lambda answer: float(answer[0] == "1"), **{**FAST, "group_size": 8}, credit="last"
    )
    found = [text for text in said if "credit=last" in text]
    assert len(found) == notes
    assert all("8 of 16 calls of this step (50%) teach nothing" in text for text in found)


async def _planner_and_tool(choose: Choose) -> str:
    first = await choose("select name", "01")
    await choose("count", "23", agent="tool")
    emit_reward(float(first == "1"))
    return first


def test_the_reward_of_an_agent_that_is_not_trained_reaches_the_call_before_it(
    tmp_path: Path, tiny_policy: Any
) -> None:
    settings = {**FAST, "credit": "turns", "agent_match": "bandit"}
    assert probability(train(tmp_path, tiny_policy, _planner_and_tool, **settings), 0, "1") > 0.8
