"""Agents and rewards are called by the names and annotations of their parameters, or refused."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Optional

import pytest

from groundwire.adapters import AgentSetupError, Answer, Endpoint, Question, agent_backend
from groundwire.rewards import RewardError, UnusableRewardError, describe_call, reward_function
from groundwire.tools.types import TEXT

QUESTION = Question(id="7", text="How many?", database="/d.sqlite", answers=TEXT, columns={"city": "Bern"})
ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
TASK = {"id": "7", "question": "How many?", "expected": "4", "ground_truth": "5", "data_source": "x", "output": "gold"}


async def _asynchronous(question: str) -> Any:
    return question


async def _yields(question: str) -> Any:
    for part in question.split():
        yield part


def _positional(question: Any, city: Any = "?", /, top_k: int = 3) -> Any:
    return [question, city, top_k]


class Callable_:
    def __call__(self, query: str, db_path: Optional[str] = None) -> Any:  # noqa: UP045
        return [query, db_path]

    def method(self, *, messages: list[Any]) -> Any:
        return messages

    @staticmethod
    def static(city: str, question: str) -> Any:
        return [city, question]


@functools.wraps(_positional)
def _decorated(*args: Any, **kwargs: Any) -> Any:
    return _positional(*args, **kwargs)


ALL = {"city": "Bern", "id": "7", "question": "How many?", "database": "/d.sqlite"}


@pytest.mark.parametrize(
    ("agent", "got"),
    [
        (lambda task: {**task}, ALL),
        (lambda x: {**x}, ALL),
        (lambda **task: task, ALL),
        (lambda *args: dict(args[0]), ALL),
        (lambda question: question, "How many?"),
        (lambda city: city, "Bern"),
        (lambda prompt, city="?": [prompt, city], ["How many?", "Bern"]),
        (lambda question, temperature=0.5, **options: [question, temperature, options], ["How many?", 0.5, {}]),
        (_asynchronous, "How many?"),
        (_yields, "Howmany?"),
        (_positional, ["How many?", "Bern", 3]),
        (_decorated, ["How many?", "Bern", 3]),
        (functools.partial(lambda question, city: [question, city], city="?"), ["How many?", "?"]),
        (functools.partial(_positional, top_k=1), ["How many?", "Bern", 1]),
        (Callable_(), ["How many?", "/d.sqlite"]),
        (Callable_().method, [{"role": "user", "content": "How many?"}]),
        (Callable_.static, ["Bern", "How many?"]),
        (Callable_, ["How many?", "/d.sqlite"]),
    ],
)
def test_an_agent_gets_what_its_parameters_are_named_like(agent: Callable[..., Any], got: Any) -> None:
    seen: list[Any] = []
    backend: Any = agent_backend(agent, agent_output=lambda value: seen.append(value) or "x")
    assert backend.describe_call(QUESTION)
    asyncio.run(backend.run(QUESTION, ENDPOINT))
    assert seen == [got]


async def _text(x: str) -> str:
    return x


async def _mapping(question: dict[str, Any]) -> str:
    return str(question["city"])


async def _own_calls(question: Any, endpoint: Any) -> str:
    return str(question.text + endpoint.model)


async def _object(q: Question, e: Endpoint) -> str:
    return q.text + e.model


def test_an_annotation_says_what_a_parameter_gets() -> None:
    answers = [asyncio.run(agent_backend(each).run(QUESTION, ENDPOINT)).text for each in (_text, _mapping)]
    assert answers == ["How many?", "Bern"]
    for each in (_own_calls, _object):
        assert asyncio.run(agent_backend(each).run(QUESTION, ENDPOINT)).text == "How many?m"


@pytest.mark.parametrize(
    "agent",
    [
        lambda question, expected: "",
        lambda ground_truth: "",
        lambda question, endpoint, more: "",
        lambda a, b: "",
        lambda question, *, gold: "",
    ],
)
async def test_an_agent_that_nothing_fits_is_refused_with_what_would_fit(agent: Any) -> None:
    fits = r"agent '<lambda>' takes \(.*\), and .*: write def agent\(question: str\)"
    with pytest.raises(ValueError, match=fits):
        agent_backend(agent).describe_call(QUESTION)  # type: ignore[attr-defined]
    with pytest.raises(AgentSetupError, match=fits):
        await agent_backend(agent).run(QUESTION, ENDPOINT)


def _compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    return {"score": float((data_source, solution_str, ground_truth) == ("x", "fine", "5")), "acc": 0.5}


def _trl(prompts: list[str], completions: list[str], ground_truth: list[str], **columns: Any) -> list[float]:
    return [float((prompts, completions, ground_truth, columns["expected"]) == (["How many?"], ["fine"], ["5"], ["4"]))]


@pytest.mark.parametrize(
    "reward",
    [
        lambda task, answer: (task["id"], answer) == ("7", "fine"),
        lambda t, a: (t["id"], a) == ("7", "fine"),
        lambda a, b, c: (a["id"], b, len(c)) == ("7", "fine", 1),
        lambda _, text: text == "fine",
        lambda row, reply: (row["id"], reply) == ("7", "fine"),
        lambda datapoint, answer: (datapoint["id"], answer) == ("7", "fine"),
        lambda reply_text, ground_truth: (reply_text, ground_truth) == ("fine", "5"),
        lambda *args: (args[0]["id"], args[1], len(args[2])) == ("7", "fine", 1),
        lambda answer: answer == "fine",
        lambda answer, expected: (answer, expected) == ("fine", "4"),
        lambda expected, answer: (answer, expected) == ("fine", "4"),
        lambda answer, output: (answer, output) == ("fine", "gold"),  # the column, as another one is the answer
        lambda output, expected: (output, expected) == ("fine", "4"),
        lambda input, output, expected: (input, output, expected) == ("How many?", "fine", "4"),
        lambda completion, *, ground_truth, steps: (completion, ground_truth, len(steps)) == ("fine", "5", 1),
        lambda task, answer, weight=1.0, **rest: (weight, rest) == (1.0, {}),
        functools.partial(lambda scale, answer: scale * (answer == "fine"), 1.0),
    ],
)
async def test_a_reward_gets_what_its_parameters_are_named_like(reward: Any) -> None:
    assert await reward_function(reward)(TASK, "fine", [{}]) == 1.0  # type: ignore[typeddict-item]


async def test_rewards_of_other_trainers_are_called_as_there() -> None:
    assert await reward_function(_compute_score)(TASK, "fine", []) == {"score": 1.0, "metric/acc": 0.5}
    assert await reward_function(_trl)(TASK, "fine", []) == 1.0
    grade = reward_function(lambda sample, item: (sample["output_text"], item["id"]) == ("fine", "7"))
    assert await grade(TASK, "fine", []) == 1.0
    several = reward_function(lambda solution_strs, ground_truths: [{"score": float(ground_truths == ["5"])}])
    assert await several(TASK, "fine", []) == {"score": 1.0}
    nested = {"id": "7", "question": "?", "data_source": "x", "reward_model": {"style": "rule", "ground_truth": "5"}}
    assert await reward_function(_compute_score)(nested, "fine", []) == {"score": 1.0, "metric/acc": 0.5}
    assert describe_call(reward_function(_trl), TASK) == (
        "_trl(prompts=the question, completions=the answer, ground_truth=the column ground_truth, **columns=the other "
        "columns), each in a list of one"
    )


@pytest.mark.parametrize(
    "reward",
    [
        lambda answer, gold: 1.0,  # no such column
        lambda got, want: 1.0,
        lambda y_true, y_pred: 1.0,
        lambda prediction, answer: 1.0,
        lambda answer, meta: 1.0,
        lambda completion_text, answer: 1.0,
        lambda answer, expected, output, missing: 1.0,
        lambda expected: 1.0,
        lambda **anything: 1.0,
    ],
)
async def test_a_reward_that_nothing_fits_is_refused_and_never_gets_another_value(reward: Any) -> None:
    with pytest.raises(UnusableRewardError, match=r"takes \(.*\), and .*: write def reward\(task, answer\)"):
        describe_call(reward_function(reward), TASK)


async def test_a_row_without_the_column_of_a_reward_has_no_reward() -> None:
    reward = reward_function(lambda answer, expected: 1.0)
    assert await reward(TASK, "", []) == 1.0
    with pytest.raises(RewardError, match="nothing fits 'expected'"):
        await reward({"id": "1", "question": "?"}, "", [])


async def test_an_answer_keeps_how_the_agent_was_called() -> None:
    answer: Answer = await agent_backend(lambda question, city: city).run(QUESTION, ENDPOINT)
    assert answer.input == "<lambda>(question='How many?', city='Bern')"
