"""The registry of rewards: names and sums of names to functions, through the plugin hook."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groundwire import rewards
from groundwire.rewards import JudgeSettings, RewardError, UnusableRewardError
from groundwire.rewards._registry import _registry, combine, parse
from groundwire.tools.plugins import UnknownNameError
from groundwire.tools.types import AgentStep

RAN = AgentStep(agent="a", kind="tool", input="SELECT 1", output="", ok=True)


@pytest.fixture
def register() -> Iterator[Any]:
    """Adds rewards for one test."""
    known = _registry._entries
    before = dict(known)
    yield known.__setitem__
    known.clear()
    known.update(before)


def test_the_built_in_rewards_are_registered() -> None:
    assert {"executes", "rule_judge_hybrid", "spider_exec_match", "spider_test_suite"} <= set(rewards.names())
    from groundwire.rewards.spider.execution_match import spider_exec_match

    assert rewards.get("spider_exec_match") is spider_exec_match


@pytest.mark.parametrize("name", ["exec", "0.5*exec", "executes+exec"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    for ask in (rewards.get, rewards.check, rewards.notes):
        with pytest.raises(UnknownNameError, match=r"unknown reward 'exec'; known: .*spider_exec_match"):
            ask(name)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("a", [(1.0, "a")]),
        ("0.9*a+0.1*b", [(0.9, "a"), (0.1, "b")]),
        (" 2 * a + b ", [(2.0, "a"), (1.0, "b")]),
        ("1e-3*a+-.5*b_2", [(0.001, "a"), (-0.5, "b_2")]),
        ("3.*x-y.z", [(3.0, "x-y.z")]),
        ("0.5*my_app.rewards:short+./a/b-c.py:f", [(0.5, "my_app.rewards:short"), (1.0, "./a/b-c.py:f")]),
    ],
)
def test_a_sum_is_parsed(text: str, terms: list[tuple[float, str]]) -> None:
    assert parse(text) == terms


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be parsed at '': write a name, or a sum like 0.9"),
        ("0.9*", r"reward '0\.9\*' cannot be parsed at '0\.9\*'"),
        ("a+", r"reward 'a\+' cannot be parsed at ''"),
        ("a b", "cannot be parsed at 'a b': write a name, or a sum"),
        ("a*0.5", r"cannot be parsed at 'a\*0\.5'"),
        ("(a+b)", r"cannot be parsed at '\(a'"),
        ("a+0.5*a", "names a twice: give it one weight"),
        ("1e400*a", r"has the weight 1e400; it must lie between -1e\+15 and 1e\+15"),
    ],
)
def test_a_text_that_is_no_sum_is_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message) as caught:
        rewards.check(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=20))
def test_any_text_is_a_sum_or_an_error(text: str) -> None:
    try:
        names = [name for _, name in parse(text)]
    except UnknownNameError as error:
        names, message = [], str(error)
    assert all(name in text for name in names) if names else repr(text) in message


async def test_the_components_of_a_sum_are_weighted_and_metrics_are_not_summed(register: Any) -> None:
    async def parts(task: Any, answer: str, steps: Any) -> dict[str, float]:
        return {"x": 0.5, "y": 1.0, "metric/z": 7.0}

    register("parts", parts)
    got = await rewards.get("0.5*executes+2*parts")({}, "", [RAN])
    assert got == {"executes": 0.5, "parts.x": 1.0, "parts.y": 2.0, "metric/parts.z": 7.0}
    assert rewards.total(got) == 3.5


async def test_the_terms_of_a_sum_run_concurrently_and_fail_together() -> None:
    ended = []
    meeting = asyncio.Event()

    async def first(task: Any, answer: str, steps: Any) -> float:
        await meeting.wait()
        return 1.0

    async def second(task: Any, answer: str, steps: Any) -> float:
        meeting.set()
        return 2.0

    async def fails(task: Any, answer: str, steps: Any) -> float:
        raise RewardError("no")

    async def hangs(task: Any, answer: str, steps: Any) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return 0.0

    assert await combine([(1.0, "a", first), (0.5, "b", second)])({}, "", []) == {"a": 1.0, "b": 1.0}
    with pytest.raises(RewardError, match="no"):
        await combine([(1.0, "a", hangs), (1.0, "b", fails)])({}, "", [])
    await asyncio.sleep(0)
    assert ended


async def test_a_reward_with_a_judge_parameter_gets_the_settings(register: Any) -> None:
    seen = []

    async def asks(task: Any, answer: str, steps: Any, *, judge: JudgeSettings) -> float:
        seen.append(judge.model)
        return 1.0

    register("asks", asks)
    await rewards.get("asks", judge=JudgeSettings(model="m"))({}, "", [])
    await rewards.get("asks+executes")({}, "", [])
    assert seen == ["m", None]


async def _two(task: Any, answer: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            lambda task, answer, steps: 1.0,
            r"reward 'mine' takes \(task, answer, steps\); write it as: async def reward",
        ),
        (_two, r"reward 'mine' takes \(task: .*; write it as: async def reward\(task, answer, steps\)"),
        ("not_installed.module:reward", "reward 'mine' cannot be imported: No module named 'not_installed'"),
        ("groundwire.rewards._sql:missing", "reward 'mine' cannot be imported: .*has no attribute 'missing'"),
    ],
)
def test_an_unusable_reward_is_a_one_line_error(value: Any, message: str, register: Any) -> None:
    register("mine", value)
    with pytest.raises(UnusableRewardError, match=message):
        rewards.get("executes+mine")


FUNCTIONS = """
def short(task, answer):
    return float(len(answer) < 5)

async def counts(task, answer, steps):
    return len(steps)

async def asks(task, answer, steps, *, judge):
    return float(judge.model == "m")

limit = 5
"""


async def test_a_function_of_the_user_s_is_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text(FUNCTIONS)
    reward = rewards.get(f"0.5*{file}:short+{file}:counts")
    assert await reward({}, "1234", [RAN, RAN]) == {f"{file}:short": 0.5, f"{file}:counts": 2}
    assert await rewards.get("my_rewards:asks", judge=JudgeSettings(model="m"))({}, "", []) == 1.0
    assert rewards.notes("my_rewards:short") == []
    for name, message in [
        ("my_rewards:shrt", "reward 'my_rewards:shrt': my_rewards has no 'shrt'; it has short, counts, asks"),
        ("my_rewards:limit", "reward '5' is no function but int; give one, as: def reward"),
        ("not_there.py:f", r"reward 'not_there\.py:f': there is no file not_there\.py"),
        ("not_there:f", "reward 'not_there:f': there is no module 'not_there'"),
        ("executes:", "reward is 'executes:'; write it as module:name"),
    ]:
        with pytest.raises(UnusableRewardError, match=message):
            rewards.get(name)


def test_the_total_is_the_sum_of_components_without_metrics() -> None:
    assert rewards.total({"executes": 0.25, "judge": 0.5, "metric/spread": 9.0}) == 0.75
    assert rewards.total(1) == 1.0


@pytest.mark.parametrize("value", [None, "high", float("nan"), {"a": float("inf")}, {"a": None}])
def test_a_reward_that_is_no_number_is_an_error(value: Any) -> None:
    with pytest.raises(RewardError, match="the reward is "):
        rewards.total(value)
