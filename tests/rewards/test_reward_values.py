"""What a reward may return, how long it may take, and that no value or delay of one ends a run."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groundwire import rewards
from groundwire.rewards import RewardError, reward_function, with_time_limit
from groundwire.rewards._registry import combine
from groundwire.train.config.resolve import resolve
from groundwire.train.job.job import Objects
from groundwire.train.job.prepare import prepare
from groundwire.train.rollouts.factory import make_reward
from groundwire.train.rollouts.runner.agent import _read_reward


class _Raises:
    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [True, 1, np.float32(1), np.int64(1), np.array(1.0), np.array([1.0]), torch.tensor(1.0), torch.tensor([1]),
     torch.tensor(1.0, requires_grad=True), Decimal(1), Fraction(1), {"a": True}, {"a": np.array([1]), "metric/b": 7},
     {"total": 1.0}, {1: 0.5, "b": Decimal("0.5")}],
)  # fmt: skip
def test_whatever_is_one_number_is_a_reward(value: Any) -> None:
    assert rewards.total(value) == 1.0
    reward, components = _read_reward(value)
    assert {type(number) for number in (reward, *components.values())} == {float}


@pytest.mark.parametrize(
    "value",
    [None, "0.5", "great", b"1", np.str_("1"), np.array("1"), 1j, np.complex64(1), [1.0], (1.0, "good"),
     np.array([1, 2]), torch.zeros(2), math.nan, -math.inf, 10**400, Decimal("NaN"), Decimal("sNaN"), _Raises(), {},
     {"metric/a": 1.0}, {"a": None}, {"a": "1"}, {"a": {"b": 1.0}}, {"a": 1.0, "metric/b": math.nan},
     1e308, np.float64(-1e308), np.longdouble("1e400"), Decimal("1e400"), Fraction(10**400, 3), {"a": 1.0, "b": 1e16},
     {"a": 9e14, "b": 9e14}, {"a": 1.0, "metric/b": 1e31}, {"total": 1.0, "a": 0.5, "b": 0.5}],
)  # fmt: skip
def test_anything_else_is_no_reward_and_the_error_shows_it(value: Any) -> None:
    with pytest.raises(RewardError, match="the reward is ") as caught:
        rewards.total(value)
    assert repr(value)[:20] in str(caught.value)


class _Unseen:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("make", [lambda: 10**5000, lambda: {"a": -(10**5000)}, _Unseen, lambda: {"a": _Unseen()}])
def test_a_value_that_cannot_be_shown_is_no_reward_either(make: Callable[[], Any]) -> None:
    with pytest.raises(RewardError, match=r"the reward is .*<(int|_Unseen)"):
        rewards.total(make())


def test_the_largest_rewards_and_metrics_have_finite_sums() -> None:
    assert rewards.total({"a": -1e15, "metric/time": 1.7e18}) == -1e15
    many = np.full(1_000_000, rewards.total(1e15), np.float32)
    assert np.isfinite((many * many).sum())


@pytest.mark.parametrize("value", [{}, {"metric/a": 1.0}, "1", None, math.nan])
async def test_a_term_of_a_sum_that_is_no_reward_is_none_of_the_sum(value: Any) -> None:
    async def term(task: Any, answer: str, steps: Any) -> Any:
        return value

    async def one(task: Any, answer: str, steps: Any) -> Any:
        return Decimal(1)

    assert await combine([(0.5, "one", one)])({}, "", []) == {"one": 0.5}
    with pytest.raises(RewardError, match="the reward is "):
        await combine([(1.0, "one", one), (1.0, "term", term)])({}, "", [])


class _Scorer:
    async def __call__(self, task: Any, answer: str) -> float:
        return 1.0

    def score(self, task: Any, answer: str, factor: float) -> float:
        return factor


async def _async(task: Any, answer: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    "function",
    [_async, _Scorer(), partial(_Scorer()), partial(_async), partial(_Scorer().score, factor=1.0),
     lambda task, answer: asyncio.sleep(0, 1.0), lambda task, answer: 1],
)  # fmt: skip
async def test_functions_objects_and_partials_are_rewards_sync_or_async(function: Callable[..., Any]) -> None:
    assert await reward_function(function)({}, "x", []) == 1.0


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: _Scorer, "a class; give an object of it"),
        (lambda: 1.0, "float; give one"),
        (lambda: _async({}, ""), "coroutine; give one"),
    ],
)
def test_what_is_no_function_is_refused_before_a_run(make: Callable[[], Any], what: str) -> None:
    value = make()
    with pytest.raises(rewards.UnusableRewardError, match=f"is no function but {what}, as: def reward"):
        reward_function(value)
    getattr(value, "close", lambda: None)()


async def test_a_reward_that_takes_too_long_is_a_failure_that_names_its_limit() -> None:
    released = threading.Event()

    async def never(task: Any, answer: str) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(60)  # it does not let itself be cancelled
        return 1.0

    def blocks(task: Any, answer: str) -> float:
        released.wait(60)
        return 1.0

    for function in (never, blocks):
        with pytest.raises(RewardError, match=r"no value within reward_timeout_s, 0\.1 s: make it faster"):
            await with_time_limit(reward_function(function), 0.1)({}, "", [])
    released.set()


async def test_the_limit_is_that_of_the_run_for_functions_and_for_names(tmp_path: Path) -> None:
    async def never(task: Any, answer: str) -> float:
        await asyncio.Event().wait()
        return 1.0

    file = tmp_path / "slow.py"
    file.write_text("import threading\ndef slow(task, answer): threading.Event().wait(30)")
    config = resolve("fast", backend="custom", reward_timeout_s=0.1)
    job = prepare(config, objects=Objects(agent={"agent": lambda task: ""}, reward=reward_function(never)))
    named = make_reward(config.model_copy(update={"reward": f"{file}:slow"}), job.domain)
    for reward in (job.reward, named):
        with pytest.raises(RewardError, match="no value within reward_timeout_s"):
            await asyncio.wait_for(reward({}, "", []), 20)


async def test_a_timeout_of_the_rewards_own_stays_its_own_and_an_exit_ends_no_run() -> None:
    def times_out(task: Any, answer: str) -> float:
        raise TimeoutError("the grader")

    async def leaves(task: Any, answer: str) -> float:
        raise SystemExit(3)

    with pytest.raises(TimeoutError, match="the grader"):
        await with_time_limit(reward_function(times_out), 60)({}, "", [])
    with pytest.raises(RewardError, match=r"the reward raised SystemExit\(3\)"):
        await with_time_limit(reward_function(leaves), 60)({}, "", [])


async def test_a_plain_reward_that_blocks_does_not_hold_up_others() -> None:
    both = threading.Barrier(2)  # each of two calls waits for the other

    def meets(task: Any, answer: str) -> float:
        both.wait(60)
        return 1.0

    reward = with_time_limit(reward_function(meets), 60)
    assert await asyncio.gather(reward({}, "", []), reward({}, "", [])) == [1.0, 1.0]
