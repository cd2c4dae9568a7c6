"""The type of a reward, what one declares, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from groundwire.tools.files import shorten_repr
from groundwire.tools.numbers import MAX_METRIC, MAX_REWARD, NumberRangeError, reward_number
from groundwire.tools.plugins import UnknownNameError
from groundwire.tools.sql.answers import KINDS
from groundwire.tools.types import AgentStep, AnswerKind

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Reward = Callable[[Mapping[str, Any], str, Sequence[AgentStep]], Awaitable[float | dict[str, float]]]
"""``async (task, answer, steps) -> float | components``. ``task`` is the row of the domain's data, gold included."""

METRIC = "metric/"
"""The prefix of components that are logged but not summed."""


ABOUT_THE_ANSWER = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, SyntaxError, RecursionError),
)
"""What a reward raises that parses an answer of another form. Other exceptions say that the reward itself is broken."""


class RewardError(Exception):
    """The reward could not be computed (a broken gold, a missing database): a typed failure, never a 0."""

    kind = "reward"


class JudgeAbstainedError(RewardError):
    """The judge gave no verdict: unreachable, unreadable, too late, or over its spending cap.

    The judge has already retried, so the rollout does not run again: it is left out of its group, and counted.
    """

    kind = "judge_abstained"


class UnusableRewardError(UnknownNameError):
    """The reward of a name cannot be imported, or cannot be called with ``(task, answer, steps)``."""


def judges_sql(function: F) -> F:
    """A decorator for a reward of SQL queries: agents are then asked for one, and it is found in their answers."""
    setattr(function, "form", "sql")  # noqa: B010 - a function has no such attribute for a type checker
    return function


def answers_of(reward: Any) -> AnswerKind | None:
    """The kind of the answers that ``reward`` judges, as far as it says so: see :func:`judges_sql`."""
    return KINDS.get(declared(reward, "form", None))


def declared_range(reward: Any) -> tuple[float, float]:
    """The least and the greatest value of ``reward``, whose attribute ``reward_range`` is like ``(-1, 1)``; else 0, 1.

    Raises :class:`UnusableRewardError` if it is not a pair of numbers that a reward may have.
    """
    ends = declared(reward, "reward_range", (0.0, 1.0))
    with suppress(TypeError, ValueError):
        least, greatest = map(reward_number, ends)
        if least <= greatest:
            return least, greatest
    raise UnusableRewardError(
        f"reward_range is {ends!r:.100}; it must be like (-1, 1): the least and the greatest reward"
    )


def declared(reward: Any, name: str, default: Any) -> Any:
    """An attribute of a reward, or of the function that it wraps or gives a judge to."""
    while reward is not None and not hasattr(reward, name):
        reward = getattr(reward, "func", getattr(reward, "__wrapped__", None))
    return getattr(reward, name, default)


def comparison_of(reward: Any) -> Any:
    """``async (task, answers, *, failed=0) -> [components]``: what is added to ``reward`` for the answers of a group,
    in which ``failed`` more have none. None if it judges each alone."""
    return declared(reward, "compare", None)


def components(value: Any) -> dict[str, float]:
    """The named numbers of a reward; one number alone is ``{"": number}``.

    A number is what :func:`.reward_number` takes. Raises :class:`RewardError` for anything else: a number as text, one
    that is too large or not finite, no component but metrics.
    """
    named = value if isinstance(value, Mapping) else {"": value}
    try:
        mosts = {name: MAX_METRIC if str(name).startswith(METRIC) else MAX_REWARD for name in named}
        numbers = {str(name): reward_number(number, mosts[name]) for name, number in named.items()}
    except NumberRangeError as error:
        raise _no_reward(value, str(error)) from error
    except Exception as error:  # a value's own conversion may raise anything
        raise _no_reward(value, "it must be a number, or a dict of named numbers") from error
    summed = [name for name in numbers if not name.startswith(METRIC)]
    if not summed:
        raise _no_reward(value, "it must have a number besides the metrics, even if it is 0")
    if "total" in summed and len(summed) > 1:
        raise _no_reward(value, f"its numbers are summed: call the total {METRIC}total")
    return numbers


def total(value: Any) -> float:
    """The trainer's scalar: the value, or the sum of its components without the metrics.

    Raises :class:`RewardError` as :func:`components` does.
    """
    result = sum(number for name, number in components(value).items() if not name.startswith(METRIC))
    if abs(result) > MAX_REWARD:
        raise _no_reward(value, f"of its sum, {NumberRangeError()}")
    return result


def _no_reward(value: Any, requirement: str) -> RewardError:
    try:
        shown = f"{value!r:.300}"
    except Exception:  # as in components
        shown = shorten_repr(value)
    return RewardError(f"the reward is {shown}; {requirement}")


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results; if one raises, or the caller is cancelled, the others are cancelled."""
    futures = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*futures))
    finally:
        for future in futures:
            future.cancel()
