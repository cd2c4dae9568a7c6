"""Credit per call, learnt by the real trainer and engine: bandits of two calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agentlightning.emitter import emit_reward
from bandits import Choose, probability, train

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
