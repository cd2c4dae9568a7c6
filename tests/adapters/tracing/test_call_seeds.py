"""Each call of a rollout has its own seed, derived from that of the rollout: calls are independent and repeatable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from bandits import Choose, probability, rollouts, train

from groundwire.adapters import ToolError
from groundwire.adapters.tracing.sampling import attempt_sampling


async def _four_times(choose: Choose) -> str:
    return "".join([await choose("select a name", "01") for _ in range(4)])


def test_an_agent_that_repeats_its_prompt_gets_independent_replies_and_two_runs_the_same(
    tmp_path: Path, tiny_policy: Any
) -> None:
    runs = [train(tmp_path / name, tiny_policy, _four_times, steps=2, group_size=16) for name in "ab"]
    answers = [[one.outcome.answer for one in run.rollouts()[0] if one.mode == "train"] for run in runs]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 8
    assert len(set(answers[0][:16]) & set(answers[0][16:])) < 10  # the steps have other seeds


def test_a_call_that_does_not_affect_the_reward_is_not_learnt(tmp_path: Path, tiny_policy: Any) -> None:
    async def agent(choose: Choose) -> str:
        return await choose("select name", "01") + await choose("count", "23") + await choose("order", "67")

    run = train(tmp_path, tiny_policy, agent, lambda answer: float(answer[0] == "1"), steps=4, group_size=40)
    assert probability(run, 0, "1") > 0.9
    # With one seed for all calls 0.98: the same random number chooses "1", "3" and "7".
    assert abs((probability(run, 1, "3") + probability(run, 2, "7")) / 2 - 0.5) < 0.15


def test_a_retried_attempt_samples_again(tmp_path: Path, tiny_policy: Any) -> None:
    chosen: list[str] = []

    async def fails_on_0(choose: Choose) -> str:
        chosen.append(await choose("select a name", "01"))
        if chosen[-1] == "0":
            raise ToolError("the database is locked")
        return chosen[-1]

    run = train(tmp_path, tiny_policy, fails_on_0, retries=1, val_temperature=1.0, val_tasks=8)
    ended = Counter((one.outcome.status, one.attempt and one.attempt.number) for one in rollouts(run))
    assert ended[("succeeded", 1)] > 5
    assert ended[("succeeded", 2)] > 2  # none, if the second attempt repeated the first
    assert ended[("tool", 2)] > 2


def test_a_first_attempt_has_the_rollouts_seed_and_others_their_own() -> None:
    seeds = [attempt_sampling({"seed": 7, "top_p": 0.5}, attempt)["seed"] for attempt in (1, 2, 3)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert attempt_sampling({"temperature": 1}, 2) == {"temperature": 1}
    assert attempt_sampling("hostile", 2) == {}
