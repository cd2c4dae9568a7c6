"""Rewards by name, or by a weighted sum of names: ``0.9*spider_exec_match+0.1*executes``.

A name with a colon is a function of the user's, ``module:function`` or ``path/to/file.py:function``. A reward with a
keyword parameter ``judge`` gets the run's judge settings. The logs keep the components of a sum apart; for any other
combination write a reward function.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groundwire.rewards._functions import reward_function
from groundwire.rewards._sql import has_variants, judged_on_variants
from groundwire.rewards._types import (
    METRIC,
    Reward,
    UnusableRewardError,
    all_of,
    answers_of,
    components,
    declared_range,
    judges_sql,
)
from groundwire.rewards.judge.compare import NAME, compare
from groundwire.rewards.judge.settings import JudgeSettings, JudgeSettingsError
from groundwire.tools.binding import is_async
from groundwire.tools.loading import load_object
from groundwire.tools.numbers import MAX_REWARD, NumberRangeError
from groundwire.tools.plugins import Registry, UnknownNameError, hookimpl
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import AgentStep

_registry: Registry[Reward] = Registry("reward", hook="register_rewards", builtin=__name__)
names = _registry.names
_TERM = re.compile(
    r"\s*(?:(?P<weight>-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?)\s*\*\s*)?"
    r"(?P<name>[^\W\d][\w.:/-]*|\.{0,2}/[\w.:/-]*)\s*"
)


def check(name: str) -> None:
    """Raise :class:`groundwire.tools.plugins.UnknownNameError` unless ``name`` is a reward or a sum of rewards."""
    for _, term in _terms(name):
        if not _is_function(term):
            _registry.check(term)


def get(name: str, *, judge: JudgeSettings | None = None) -> Reward:
    """The reward ``name``, or the sum that it describes. ``judge`` None: the local grader.

    Raises :class:`groundwire.tools.plugins.UnknownNameError`; its subclass :class:`UnusableRewardError` included.
    """
    bound: list[tuple[float, str, Any]] = []
    for weight, term in _terms(name):
        reward: Any = _load(term)
        if _takes_judge(reward):
            reward = functools.partial(reward, judge=judge or JudgeSettings())
        bound.append((weight, term, reward))
    reward = bound[0][2] if len(bound) == 1 and bound[0][:2] == (1.0, name) else combine(bound)
    if of_group := comparison(name, judge=judge):
        reward.compare = of_group
    return reward


def comparison(name: str, *, judge: JudgeSettings | None = None) -> Any:
    """What :func:`rewards.comparison_of` gives for the reward ``name``, whose functions may be elsewhere."""
    weights = [weight for weight, term in _terms(name) if term == NAME] if name else []
    return functools.partial(compare, judge=judge or JudgeSettings(), weight=weights[0]) if weights else None


def has_functions(name: str) -> bool:
    """Whether a term of the reward ``name`` is a function of the user's."""
    return any(_is_function(term) for _, term in _terms(name))


def notes(name: str, *, judge: JudgeSettings | None = None) -> list[str]:
    """Notes for the user before a run with reward ``name``: the judge of its answers.

    Raises as :func:`get`, and :class:`.JudgeSettingsError` for settings of a judge that it does not ask, or lacks.
    """
    settings = judge or JudgeSettings()
    judged = [term for _, term in _terms(name) if _takes_judge(_load(term))]
    if not judged and settings != JudgeSettings():
        raise JudgeSettingsError(f"reward {name!r} uses no judge: leave out the judge's options")
    asked = f"; {2 * settings.samples} requests rank the answers to a task, if they differ" * (NAME in judged)
    if asked and settings.model is None:
        raise JudgeSettingsError(f"{NAME} needs a judge's model, which ranks answers: give --judge-model")
    return [f"{' and '.join(judged)}: {settings.describe()}{asked}"] if judged else []


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
    signature = inspect.signature(reward)
    try:
        signature.bind({}, "", [], **({"judge": None} if _takes_judge(reward) else {}))
        if is_async(reward):
            return reward
    except TypeError:
        pass
    raise UnusableRewardError(f"reward {name!r} takes {signature}; write it as: async def reward(task, answer, steps)")


def _takes_judge(reward: Any) -> bool:
    return "judge" in inspect.signature(reward).parameters


def parse(text: str) -> list[tuple[float, str]]:
    """The weight and name of each term. Raises :class:`groundwire.tools.plugins.UnknownNameError`."""
    weights: dict[str, float] = {}
    for term in text.split("+"):
        if (match := _TERM.fullmatch(term)) is None:
            raise UnknownNameError(
                f"reward {text!r} cannot be parsed at {term!r}: write a name, or a sum like "
                "0.9*spider_exec_match+0.1*executes"
            )
        if match["name"] in weights:
            raise UnknownNameError(f"reward {text!r} names {match['name']} twice: give it one weight")
        weights[match["name"]] = weight = float(match["weight"] or 1)
        if abs(weight) > MAX_REWARD:
            raise UnknownNameError(f"reward {text!r} has the weight {match['weight']}; {NumberRangeError()}")
    return [(weight, name) for name, weight in weights.items()]


def combine(terms: Sequence[tuple[float, str, Reward]]) -> Reward:
    """The weighted sum of some rewards, which are computed concurrently; if one raises, the sum does.

    A term's number becomes the component ``name``, its components become ``name.component``, both times the weight.
    Metrics are not weighted.
    """

    async def reward(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> dict[str, float]:
        values = await all_of(function(task, answer, steps) for _, _, function in terms)
        summed: dict[str, float] = {}
        for (weight, name, _), value in zip(terms, values, strict=True):
            for component, number in components(value).items():
                if component.startswith(METRIC):
                    summed[f"{METRIC}{name}.{component.removeprefix(METRIC)}"] = number
                else:
                    summed[f"{name}.{component}" if component else name] = weight * number
        return summed

    calls = [getattr(function, "describe_call", None) for _, _, function in terms]
    reward.describe_call = lambda task: " + ".join(call(task) for call in calls if call)  # type: ignore[attr-defined]
    ranges = [(weight, declared_range(function)) for weight, _, function in terms]
    ends = [sorted((weight * least, weight * greatest)) for weight, (least, greatest) in ranges]
    reward.reward_range = tuple(map(sum, zip(*ends, strict=True)))  # type: ignore[attr-defined]
    if any(has_variants(function) for _, _, function in terms):
        return judged_on_variants(reward)
    return judges_sql(reward) if any(answers_of(function) is SQL for _, _, function in terms) else reward


@hookimpl
def register_rewards(register: Callable[[str, str], None]) -> None:
    """Execution match of Spider and BIRD made safe to train on, also on variants of the database; a judge for prose."""
    for name in ("bird_efficiency", "bird_exec_match", "bird_r_ves", "bird_soft_f1"):
        register(name, f"groundwire.rewards.bird:{name}")
    register("executes", "groundwire.rewards._sql:executes")
    register(NAME, "groundwire.rewards.judge.compare:judge_compare")
    register("rule_judge_hybrid", "groundwire.rewards.judge.rule_judge_hybrid:rule_judge_hybrid")
    register("spider_exec_match", "groundwire.rewards.spider.execution_match:spider_exec_match")
    register("spider_test_suite", "groundwire.rewards.spider.execution_match:spider_test_suite")
