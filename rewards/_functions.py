"""A user's function as a reward: sync or async, called by the names of its parameters."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

from groundwire.rewards._types import (
    ABOUT_THE_ANSWER,
    METRIC,
    Reward,
    RewardError,
    UnusableRewardError,
    declared_range,
    total,
)
from groundwire.tools.binding import Binder, BindingError, Value, is_async
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.types import AgentStep

T = TypeVar("T")
R = TypeVar("R")
_CONCURRENCY = 32
_BATCHES = ("completions", "solution_strs", "predictions", "responses", "generations")
_VERL = ("solution_str", "solution_strs")
_ANSWERS = (
    *("completion", "solution_str", "prediction", "response", "generation", "pred", "y_pred", "predicted", "generated"),
    *("hypothesis", "candidate", "reply", "model_output", "answer", "output", "outputs", "result", "text"),
)
_QUESTIONS = ("prompt", "prompts", "query", "input", "problem")
VALUES = (
    Value("answer", "the answer", "text", (*_BATCHES, *_ANSWERS), batches=_BATCHES),
    Value("task", "the task", "mapping", ("task",), ("row", "item", "example", "sample", "doc", "record", "inputs")),
    Value("steps", "the agent's steps", "list", ("steps",)),
    Value("question", "the question", "text", ("question",), _QUESTIONS, batches=("prompts",)),
)
"""What the parameters of a reward may mean. ``answer`` is the column of this name where another one is the answer."""
_SAMPLE = Value("sample", "the answer as output_text", "mapping", ("sample",))
"""Beside ``item``, as OpenAI's graders have it."""


def reward_function(function: Callable[..., Any]) -> Reward:
    """The reward that calls ``function`` by the names of its parameters: the task, the answer, columns of the task.

    verl's ``compute_score(data_source, solution_str, ground_truth, extra_info)``, TRL's ``reward(completions,
    **columns)`` and OpenAI's ``grade(sample, item)`` are called as there, TRL's with lists of one. ``(a, b)``, whose
    names say nothing, are the task and the answer. A plain function may block: each call has its own thread. Raises
    :class:`UnusableRewardError`; :func:`describe_call` does for what depends on the columns.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function) or inspect.isclass(function):
        what = "a class; give an object of it" if inspect.isclass(function) else f"{type(function).__name__}; give one"
        raise UnusableRewardError(f"reward {name!r} is no function but {what}, as: def reward(task, answer)")
    example = "def reward(task, answer) or (task, answer, steps)"
    needs = ("answer", "steps")
    binder = Binder(function, f"reward {name!r}", VALUES, ("task", "answer", "steps"), needs, example)
    if {"sample", "item"} <= binder.signature.parameters.keys():
        binder = replace(binder, values=(_SAMPLE, *VALUES), needs=(*needs, "sample"))
    try:
        binder.check()
    except BindingError as error:
        raise UnusableRewardError(str(error)) from error

    @wraps(function)
    async def reward(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> Any:
        values = {"task": task, "answer": answer, "steps": steps, "question": task.get("question", "")}
        values["sample"] = {"output_text": answer}
        try:
            bound = binder.arguments(values, _columns(task))
        except BindingError as error:  # a row that lacks a column
            raise RewardError(str(error)) from error

        call = partial(function, *bound.args, **bound.kwargs)
        value = call() if is_async(function) else await asyncio.wrap_future(in_thread(call, name="reward"))
        return _of_one(await value if inspect.isawaitable(value) else value, binder, task)

    reward.reward_range = declared_range(function)  # type: ignore[attr-defined]
    reward.describe_call = lambda task: f"{name}{binder.describe(_columns(task))}"  # type: ignore[attr-defined]
    return reward


def with_time_limit(reward: Reward, timeout_s: float) -> Reward:
    """``reward``, whose value after ``timeout_s`` seconds is a :class:`RewardError` that names the limit.

    Nothing waits for a call that is over time: the thread of a plain function runs on.
    """

    async def call(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> Any:
        try:
            return await reward(task, answer, steps)
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the event loop
            raise RewardError(f"the reward raised {error!r}") from error

    @wraps(reward)
    async def limited(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> Any:
        work = asyncio.ensure_future(call(task, answer, steps))
        try:
            await asyncio.wait({work}, timeout=timeout_s)  # wait_for() would wait until a cancelled reward ends
            if work.done():
                return work.result()
        finally:
            work.cancel()
        raise RewardError(
            f"the reward gave no value within reward_timeout_s, {timeout_s:g} s: make it faster, or the limit longer"
        )

    return limited


@dataclass(frozen=True)
class Score:
    """The reward of one answer; ``value`` is None where the reward raised ``error``."""

    value: float | None
    error: str = ""
    is_broken: bool = False
    """Whether the error says nothing of the answer."""


async def score(reward: Reward, task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> Score:
    """Call ``reward`` and return whatever it raises as a :class:`Score`."""
    try:
        return Score(total(await reward(task, answer, steps)))
    except Exception as error:
        text = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
        return Score(None, text, not isinstance(error, ABOUT_THE_ANSWER))


async def map_concurrently(
    function: Callable[[T], Awaitable[R]], items: Iterable[T], *, on_end: Callable[[], None] = lambda: None
) -> list[R]:
    """The results of ``function`` in the items' order; ``on_end`` is called after each item."""
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def one(item: T) -> R:
        async with slots:
            result = await function(item)
            on_end()
            return result

    return list(await asyncio.gather(*map(one, items)))


def describe_call(reward: Reward, task: Mapping[str, Any]) -> str:
    """How a user's function is called for tasks like ``task``; empty for a reward that is none.

    Raises :class:`UnusableRewardError` if nothing fits one of its parameters.
    """
    try:
        return getattr(reward, "describe_call", lambda _: "")(task)
    except BindingError as error:
        raise UnusableRewardError(str(error)) from error


def _columns(task: Mapping[str, Any]) -> Mapping[str, Any]:
    """The task's columns, and verl's ground truth as one of them."""
    nested = task.get("reward_model")
    return {**nested, **task} if isinstance(nested, Mapping) else task


def _of_one(value: Any, binder: Binder, task: Mapping[str, Any]) -> Any:
    """The reward of one answer, where the function returns those of many, or verl's dict with its ``score``."""
    if isinstance(value, list | tuple) and len(value) == 1 and binder.bind(_columns(task)).batched:
        [value] = value
    if isinstance(value, Mapping) and "score" in value and not binder.signature.parameters.keys().isdisjoint(_VERL):
        others = {f"{METRIC}{name}": number for name, number in value.items() if isinstance(number, int | float)}
        return others | {"score": others.pop(f"{METRIC}score", value["score"])}
    return value
