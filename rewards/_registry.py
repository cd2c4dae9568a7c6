"""Rewards by name: the registry, and ``0.9*a+0.1*b`` wherever a name is asked for.

The built-in names come from :mod:`groundwire.rewards._builtin`, through the hook that anybody uses. A reward with a
keyword parameter ``judge`` is given the run's judge settings, as a backend is given the options that it names: nothing
has to be said twice, and the reward stays a plain function.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from groundwire.rewards._compose import combine, parse
from groundwire.rewards._types import Reward
from groundwire.rewards.judge.settings import JudgeSettings
from groundwire.tools.plugins import Registry, UnknownNameError

__all__ = ["UnusableRewardError", "check", "get", "names", "notes"]

_registry: Registry[Reward] = Registry("reward", hook="register_rewards", builtin="groundwire.rewards._builtin")
names = _registry.names
_SHAPE = "reward(task, answer, steps)"


class UnusableRewardError(UnknownNameError):
    """A name whose reward cannot be imported, or is no async function of ``(task, answer, steps)``."""


def check(name: str) -> None:
    """Raise :class:`groundwire.tools.plugins.UnknownNameError` where ``name`` is no reward and no sum of rewards."""
    for _, each in _terms(name):
        _registry.check(each)


def get(name: str, *, judge: JudgeSettings | None = None) -> Reward:
    """The reward ``name``, or the sum that it says.

    Raises :class:`groundwire.tools.plugins.UnknownNameError`, and :class:`UnusableRewardError`, which is one.

    ``judge`` is for those that ask a judge; without it they are graded on this machine.
    """
    terms = _terms(name)
    found = [(weight, each, _bound(_one(each), judge)) for weight, each in terms]
    return found[0][2] if terms == [(1.0, name)] else combine(found)


def notes(name: str, *, judge: JudgeSettings | None = None) -> list[str]:
    """What a person who chose ``name`` should be told before it starts, a sentence each. Raises as :func:`get`."""
    judged = [each for _, each in _terms(name) if _takes_judge(_one(each))]
    return [f"{' and '.join(judged)}: {(judge or JudgeSettings()).describe()}"] if judged else []


def _terms(name: str) -> list[tuple[float, str]]:
    return [(1.0, name)] if name in _registry.names() else parse(name)


def _one(name: str) -> Reward:
    try:
        reward = _registry.get(name)
    except (AttributeError, ImportError) as error:
        raise UnusableRewardError(f"reward {name!r} cannot be imported: {error}") from error
    if not any(map(inspect.iscoroutinefunction, (reward, getattr(reward, "__call__", None)))):  # noqa: B004
        raise UnusableRewardError(f"reward {name!r} is no async function; write it as: async def {_SHAPE}")
    try:
        inspect.signature(reward).bind({}, "", [], **({"judge": None} if _takes_judge(reward) else {}))
    except TypeError as error:
        shape = inspect.signature(reward)
        raise UnusableRewardError(f"reward {name!r} takes {shape}; it is called with (task, answer, steps)") from error
    return reward


def _bound(reward: Any, judge: JudgeSettings | None) -> Reward:
    return functools.partial(reward, judge=judge or JudgeSettings()) if _takes_judge(reward) else reward


def _takes_judge(reward: Any) -> bool:
    return "judge" in inspect.signature(reward).parameters
