"""Rewards by name, or by a sum of names.

A name with a colon is a function of the user's, ``module:function`` or ``path/to/file.py:function``. A reward with a
keyword parameter ``judge`` gets the run's judge settings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from groundwire.rewards._compose import combine, parse
from groundwire.rewards._functions import reward_function
from groundwire.rewards._types import Reward, UnusableRewardError
from groundwire.rewards.judge.settings import JudgeSettings, JudgeSettingsError
from groundwire.tools.binding import is_async
from groundwire.tools.loading import load_object
from groundwire.tools.plugins import Registry, hookimpl

_registry: Registry[Reward] = Registry("reward", hook="register_rewards", builtin=__name__)
names = _registry.names


def check(name: str) -> None:
    """Raise :class:`groundwire.tools.plugins.UnknownNameError` unless ``name`` is a reward or a sum of rewards."""
    for _, term in _terms(name):
        if not _is_function(term):
            _registry.check(term)


def get(name: str, *, judge: JudgeSettings | None = None) -> Reward:
    """The reward ``name``, or the sum that it describes. ``judge`` None: the local grader.

    Raises :class:`groundwire.tools.plugins.UnknownNameError`; its subclass :class:`UnusableRewardError` included.
    """
    bound: list[tuple[float, str, Reward]] = []
    for weight, term in _terms(name):
        reward: Any = _load(term)
        if _takes_judge(reward):
            reward = functools.partial(reward, judge=judge or JudgeSettings())
        bound.append((weight, term, reward))
    return bound[0][2] if len(bound) == 1 and bound[0][:2] == (1.0, name) else combine(bound)


def notes(name: str, *, judge: JudgeSettings | None = None) -> list[str]:
    """Notes for the user before a run with reward ``name``: the judge of its answers.

    Raises as :func:`get`, and :class:`.JudgeSettingsError` for settings of a judge that it does not ask.
    """
    judged = [term for _, term in _terms(name) if _takes_judge(_load(term))]
    if not judged and judge not in (None, JudgeSettings()):
        raise JudgeSettingsError(f"reward {name!r} uses no judge: leave out the judge's options")
    return [f"{' and '.join(judged)}: {(judge or JudgeSettings()).describe()}"] if judged else []


def _terms(name: str) -> list[tuple[float, str]]:
    return [(1.0, name)] if name in _registry.names() else parse(name)


def _is_function(name: str) -> bool:
    return ":" in name and name not in _registry.names()


def _load(name: str) -> Reward:
    try:
        reward = load_object(name, option="reward") if _is_function(name) else _registry.get(name)
    except (AttributeError, ImportError) as error:
        raise UnusableRewardError(f"reward {name!r} cannot be imported: {error}") from error
    except ValueError as error:
        raise UnusableRewardError(str(error)) from error
    if _is_function(name) and not (inspect.isfunction(reward) and _takes_judge(reward)):
        return reward_function(reward)
    if not is_async(reward):
        raise UnusableRewardError(
            f"reward {name!r} is not an async function; write it as: async def reward(task, answer, steps)"
        )
    try:
        inspect.signature(reward).bind({}, "", [], **({"judge": None} if _takes_judge(reward) else {}))
    except TypeError as error:
        signature = inspect.signature(reward)
        raise UnusableRewardError(
            f"reward {name!r} takes {signature}; it is called with (task, answer, steps)"
        ) from error
    return reward


def _takes_judge(reward: Any) -> bool:
    return "judge" in inspect.signature(reward).parameters


@hookimpl
def register_rewards(register: Callable[[str, str], None]) -> None:
    """Execution match of Spider and BIRD made safe to train on, also on variants of the database; a judge for prose."""
    for name in ("bird_efficiency", "bird_exec_match", "bird_r_ves", "bird_soft_f1"):
        register(name, f"groundwire.rewards.bird:{name}")
    register("executes", "groundwire.rewards._sql:executes")
    register("rule_judge_hybrid", "groundwire.rewards.judge.rule_judge_hybrid:rule_judge_hybrid")
    register("spider_exec_match", "groundwire.rewards.spider:spider_exec_match")
    register("spider_test_suite", "groundwire.rewards.spider:spider_test_suite")
