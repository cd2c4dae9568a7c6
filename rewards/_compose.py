"""Weighted sums of rewards: ``0.9*spider_exec_match+0.1*executes``.

The logs keep the components of a sum apart. For any other combination write a reward function.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.rewards._sql import has_variants, judged_on_variants
from groundwire.rewards._types import METRIC, Reward, answers_of, components, declared_range, judges_sql
from groundwire.tools.plugins import UnknownNameError
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import AgentStep

_TERM = re.compile(
    r"\s*(?:(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*\*\s*)?"
    r"(?P<name>[^\W\d][\w.:/-]*|\.{0,2}/[\w.:/-]*)\s*"
)


def parse(text: str) -> list[tuple[float, str]]:
    """The weight and name of each term. Raises :class:`groundwire.tools.plugins.UnknownNameError`."""
    terms: list[tuple[float, str]] = []
    position = 0
    while match := _TERM.match(text, position):
        weight, name = float(match["weight"] or 1), match["name"]
        if name in (each for _, each in terms):
            raise UnknownNameError(f"reward {text!r} names {name} twice: give it one weight")
        terms.append((weight, name))
        position = match.end()
        if position == len(text):
            return terms
        if text[position] != "+":
            break
        position += 1
    raise UnknownNameError(
        f"reward {text!r} cannot be parsed from {text[position:]!r} on: write a name, or a sum like "
        "0.9*spider_exec_match+0.1*executes"
    )


def combine(terms: Sequence[tuple[float, str, Reward]]) -> Reward:
    """The weighted sum of some rewards, which are computed concurrently; if one raises, the sum does.

    A term's number becomes the component ``name``, its components become ``name.component``, both times the weight.
    Metrics are not weighted.
    """

    async def reward(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> dict[str, float]:
        work = [asyncio.ensure_future(function(task, answer, steps)) for _, _, function in terms]
        try:
            values = await asyncio.gather(*work)
        finally:
            for future in work:
                future.cancel()
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
