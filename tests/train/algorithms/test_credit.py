"""The return, advantage and weight of each call of a group's rollouts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from group_advantages import normalize
from training_groups import Sampled, llm_call, training_groups

from groundwire.adapters.tracing import CallCredit, LLMCall, trajectories
from groundwire.train.algorithms import credit as credit_module
from groundwire.train.algorithms.credit import TrainingGroup, token_credit, training_items
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.store.rollout import Outcome, Rollout


def _call(
    number: int, prompt: int = 0, *, agent: str = "", reward: float | None = None, choice: int | None = None
) -> LLMCall:
    return llm_call(number, [prompt or number], [7, 8], agent=agent, reward=reward, choice=choice)


Group = list[tuple[float, list[LLMCall]]]
CONFIG = resolve("fast", credit="broadcast")


def assign_credit(group: Group, **settings: Any) -> list[list[CallCredit]]:
    config = CONFIG.model_copy(update=settings)
    return credit_module.assign_credit([(reward, calls) for reward, calls in group], config)


def _group(group: Group, **settings: Any) -> TrainingGroup:
    [made] = training_groups([Sampled("a", reward, calls) for reward, calls in group], **settings)
    return made


def _credits(group: Group, **settings: Any) -> list[list[CallCredit]]:
    return [list(trained.credits.values()) for trained in _group(group, **settings).rollouts]


HIGH, LOW = 0.7071057, -0.7071057


def test_a_rollout_of_five_calls_weighs_as_much_in_its_group_as_a_rollout_of_one() -> None:
    [many, [one]] = assign_credit([(1.0, [_call(number) for number in range(5)]), (0.0, [_call(9)])])
    assert [call.advantage for call in many] == pytest.approx([HIGH] * 5)
    assert one.advantage == pytest.approx(LOW)


@pytest.mark.parametrize("count", [2, 3, 7, 8, 16])
@pytest.mark.parametrize("reward", [1.0, 0.7, 0.333])
def test_equal_returns_have_an_advantage_of_0(reward: float, count: int) -> None:
    # The mean of eight times 0.7 is not 0.7 in float32, and 0.1 + 0.2 is not 0.3 in float64.
    assert normalize([reward] * count) == [0.0] * count
    assert normalize([0.3] * count + [0.1 + 0.2]) == [0.0] * (count + 1)


def test_a_lone_rollout_has_nothing_to_be_compared_with() -> None:
    for credit in ("broadcast", "last", "discount", "turns"):
        [[first, second], nothing] = assign_credit([(1.0, [_call(1), _call(2)]), (0.0, [])], credit=credit)
        assert (first.advantage, second.advantage, nothing) == (0.0, 0.0, [])


def test_last_and_discount_weight_the_calls() -> None:
    group = [(1.0, [_call(1), _call(2), _call(3)]), (0.0, [_call(4)])]
    weights = {
        credit: [call.weight for call in assign_credit(group, credit=credit, credit_discount=0.5)[0]]
        for credit in ("broadcast", "last", "discount", "turns")
    }
    assert weights == {
        "broadcast": [1.0, 1.0, 1.0],
        "last": [0.0, 0.0, 1.0],
        "discount": [0.25, 0.5, 1.0],
        "turns": [1.0, 1.0, 1.0],
    }


def test_truncated_replies_are_trained_or_left_out_or_make_the_reward_the_least() -> None:
    group = [(1.0, [_call(1), replace(_call(2), finish_reason="length")]), (0.0, [_call(3)]), (0.0, [_call(4)])]
    trained, masked, zeroed = (_credits(group, truncated=mode)[0] for mode in ("train", "mask", "zero"))
    assert [call.weight for call in trained] == [1.0, 1.0]
    assert [call.weight for call in masked] == [1.0, 0.0]
    assert [call.advantage for call in masked] == [call.advantage for call in trained] != [0.0, 0.0]
    assert [(call.returns, call.advantage, call.weight) for call in zeroed] == [(0.0, 0.0, 1.0)] * 2


def test_a_truncated_reply_is_never_better_than_the_least_reward_of_its_group_or_run() -> None:
    cut = (-1.0, [replace(_call(1), finish_reason="length")])
    worst = _credits([cut, (-1.0, [_call(2)]), (-0.5, [_call(3)])], truncated="zero", least=-1.0)
    assert worst[0][0] == worst[1][0]
    [group] = training_groups([Sampled("a", 1.0, cut[1])], truncated="zero", least=-2.0)
    assert group.rollouts[0].reward == -2.0


@pytest.mark.parametrize("credit", ["last", "discount", "turns"])
def test_every_mode_leaves_truncated_replies_out(credit: str) -> None:
    group = [(1.0, [replace(_call(1), finish_reason="length"), _call(2)]), (0.0, [_call(3)])]
    weights = [call.weight for call in _credits(group, credit=credit, truncated="mask")[0]]
    assert weights == [0.0, 1.0]


def test_a_turns_return_is_its_reward_and_the_discounted_rest() -> None:
    calls = [_call(1, reward=0.5), _call(2), _call(3, reward=0.25)]
    [credits, _] = assign_credit([(1.0, calls), (0.0, [_call(4)])], credit="turns", credit_discount=0.5)
    assert [call.returns for call in credits] == [0.5 + 0.5 * 0.625, 0.5 * 1.25, 1.25]


def test_the_choices_of_a_request_share_its_return() -> None:
    calls = [_call(1, choice=0, reward=0.5), _call(1, choice=1, reward=0.5), _call(2)]
    [credits, _] = assign_credit([(1.0, calls), (0.0, [_call(4)])], credit="turns", credit_discount=0.5)
    assert [call.returns for call in credits] == [1.0, 1.0, 1.0]


def test_turns_compares_calls_that_read_the_same_prompt() -> None:
    """Then those of the same agent and ordinal, then all calls of the group."""
    good = [_call(1, 1, agent="a"), _call(2, 20, agent="b"), _call(3, 30, agent="c")]
    bad = [_call(4, 1, agent="a"), _call(5, 50, agent="b"), _call(6, 60, agent="b")]
    other = [_call(7, 1, agent="a"), _call(8, 50, agent="x")]
    made = assign_credit([(1.0, good), (0.0, bad), (0.5, other)], credit="turns")
    advantages = [[call.advantage for call in calls] for calls in made]
    assert [each[0] for each in advantages] == pytest.approx([1.0, -1.0, 0.0], abs=1e-4)
    assert advantages[0][1] == pytest.approx(1.0, abs=1e-4)  # the first calls of agent b
    assert advantages[1][1] == pytest.approx(-0.5, abs=1e-4)  # the calls with prompt 50
    assert advantages[2][1] == pytest.approx(0.5, abs=1e-4)
    assert advantages[0][2] == pytest.approx(1.0, abs=1e-4)  # all calls, whose mean is 0.5
    assert advantages[1][2] == pytest.approx(-1.0, abs=1e-4)


def test_a_rollout_is_not_only_compared_with_itself() -> None:
    made = assign_credit([(1.0, [_call(1, 1), _call(2, 1)]), (0.0, [_call(3, 2), _call(4, 2)])], credit="turns")
    assert [[call.advantage for call in calls] for calls in made] == [
        [pytest.approx(HIGH)] * 2,
        [pytest.approx(LOW)] * 2,
    ]


def _chain(number: int, length: int, **changes: Any) -> list[LLMCall]:
    """Calls that begin with the same prompt."""
    return [replace(_call(number + 1), prompt_ids=[1, *[number] * place], **changes) for place in range(length)]


@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_teach_nothing_however_many_calls_they_took(scale: bool) -> None:
    group = [(1.0, _chain(number, 2 + number % 2)) for number in range(4)]
    credits = assign_credit(group, credit="turns", credit_discount=0.9, loss="token-mean" if scale else "dr-grpo")
    assert {call.advantage for calls in credits for call in calls} == {0.0}
    assert not _group(group, credit="turns", credit_discount=0.9, loss="token-mean" if scale else "dr-grpo").teaches


def test_a_discount_does_not_outweigh_right_against_wrong() -> None:
    """The deviation is that of the rewards: of two right answers the longer is 0.1 worse, not as bad as a wrong one."""
    group = [
        (reward, _chain(number, length)) for number, (reward, length) in enumerate([(1, 1), (1, 2), (1, 2), (0, 1)])
    ]
    [short], [long, _], _, [wrong] = assign_credit(group, credit="turns", credit_discount=0.9)
    assert short.advantage - long.advantage == pytest.approx(0.1 / 0.5, abs=1e-4)
    assert short.advantage - wrong.advantage == pytest.approx(1.0 / 0.5, abs=1e-4)


@pytest.mark.parametrize("credit", ["broadcast", "turns"])
def test_a_call_cost_is_compared_in_units_of_the_reward(credit: Any) -> None:
    group = [(1.0, _chain(0, 1)), (1.0, _chain(1, 3)), (0.0, _chain(2, 1))]
    [short], [long, *_], [wrong] = assign_credit(group, credit=credit, call_cost=0.05)
    deviation = 3**-0.5
    assert [call.returns for call in (short, long, wrong)] == pytest.approx([0.95, 0.85, -0.05])
    assert short.advantage - long.advantage == pytest.approx(0.1 / deviation, abs=1e-4)
    assert short.advantage - wrong.advantage == pytest.approx(1.0 / deviation, abs=1e-4)


@pytest.mark.parametrize("credit", ["broadcast", "turns"])
def test_with_equal_rewards_a_call_cost_prefers_fewer_calls_and_is_no_teaching(credit: Any) -> None:
    group = [(1.0, _chain(0, 1)), (1.0, _chain(1, 3))]
    [[short], [long, *_]] = assign_credit(
        group, credit=credit, call_cost=0.05, credit_discount=0.9 if credit == "turns" else 1
    )
    costs = 0.05 * (0.9 + 0.81) if credit == "turns" else 0.1
    assert short.advantage - long.advantage == pytest.approx(costs, abs=1e-6)  # undivided
    assert not _group(group, credit=credit, call_cost=0.05).teaches


@pytest.mark.parametrize("credit", ["last", "discount"])
def test_the_choices_of_a_request_have_one_weight(credit: Any) -> None:
    calls = [_call(1), *[_call(2 + choice, choice=choice) for choice in range(3)]]
    [credits, _] = assign_credit([(1.0, calls), (0.0, [_call(9)])], credit=credit, credit_discount=0.5)
    assert [call.weight for call in credits] == [0.0 if credit == "last" else 0.5, 1.0, 1.0, 1.0]


def test_a_request_whose_first_choice_is_not_trained_is_a_request_of_its_own() -> None:
    calls = [_call(1), _call(3, choice=1), _call(4, choice=2)]
    [credits, _] = assign_credit([(1.0, calls), (0.0, [_call(9)])], credit="last")
    assert [call.weight for call in credits] == [0.0, 1.0, 1.0]


def _check_bandit(accuracy: tuple[float, float], settings: Mapping[str, Any]) -> float:
    """The probability of a further call that raises the accuracy, after 40 steps of 20 groups of 8. It begins at 0.5,
    and is one logit.
    """
    chance, logit = random.Random(0), 0.0
    for _ in range(40):
        gradient, likely = 0.0, 1 / (1 + math.exp(-logit))
        for _ in range(20):
            checks = [chance.random() < likely for _ in range(8)]
            group = [(float(chance.random() < accuracy[check]), _chain(1, 1 + check)) for check in checks]
            credits = assign_credit(group, **settings)
            first = [calls[0].weight * calls[0].advantage for calls in credits]
            gradient += sum(a * (check - likely) for a, check in zip(first, checks, strict=True))
        logit += 0.3 * math.copysign(1, gradient) if gradient else 0.0
    return 1 / (1 + math.exp(-logit))


def test_the_presets_credit_learns_a_call_that_raises_the_accuracy_and_not_one_that_changes_nothing() -> None:
    config = resolve("fast")
    settings = {"credit": config.credit, "credit_discount": config.credit_discount, "call_cost": config.call_cost}
    assert (config.credit, config.credit_discount, config.call_cost) == ("turns", 1.0, 0.0)
    assert _check_bandit((0.80, 0.95), settings) > 0.95
    assert _check_bandit((1.0, 1.0), settings) == 0.5
    assert _check_bandit((1.0, 1.0), {**settings, "call_cost": 0.01}) < 0.05
    assert _check_bandit((0.80, 0.95), {**settings, "call_cost": 0.05}) > 0.95
    assert _check_bandit((0.80, 0.95), {**settings, "call_cost": 0.30}) < 0.05


def test_tokens_have_the_advantage_of_their_call() -> None:
    first = _call(1)
    second = replace(first, prompt_ids=[1, 7, 8, 5], sequence=2)
    [trajectory] = trajectories([first, second])
    credits = {(1, None): CallCredit(1.0, 2.0, 0.5), (2, None): CallCredit(1.0, -1.0, 1.0)}
    assert token_credit(trajectory, credits) == ([1, 1, 0, 1, 1], [1.0, 1.0, 0.0, -1.0, -1.0])
    credits[1, None] = CallCredit(1.0, 2.0, 0.0)
    assert token_credit(trajectory, credits) == ([0, 0, 0, 1, 1], [0.0, 0.0, 0.0, -1.0, -1.0])


def test_a_rollout_has_the_credit_of_its_calls_once_its_group_is_recorded() -> None:
    group = _group([(1.0, [_call(1), _call(2)]), (0.0, [_call(3)])], credit="last")
    calls = [call for trained in group.rollouts for call in trained.rollout.calls]
    assert [call.credit for call in calls] == [None] * 3  # a group that is replaced is not trained
    group.record()
    assert [(call.credit.weight, call.credit.advantage) for call in calls if call.credit] == [
        (0.0, pytest.approx(HIGH)),
        (1.0, pytest.approx(HIGH)),
        (1.0, pytest.approx(LOW)),
    ]


def test_a_rollout_without_a_reward_is_in_no_group() -> None:
    rollouts = [Rollout(task={"id": "a"}, group="a", outcome=Outcome(reward=reward)) for reward in (None, 0.0)]
    [group] = training_items(rollouts, RunConfig(), least=0.0)
    assert len(group.rollouts) == 1
