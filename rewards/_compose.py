"""Sums of rewards: ``0.9*spider_exec_match+0.1*executes``.

Sums with weights are all there is. They keep what makes a reward readable afterwards: each part is a number of its own
in the logs. Whoever needs more than a sum writes a reward, which is one function.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.rewards._types import METRIC, Reward
from groundwire.tools.plugins import UnknownNameError
from groundwire.tools.types import AgentStep

__all__ = ["combine", "parse"]

_TERM = re.compile(r"\s*(?:(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*\*\s*)?(?P<name>[^\W\d][\w.:-]*)\s*")
_EXAMPLE = "0.9*spider_exec_match+0.1*executes"


def parse(text: str) -> list[tuple[float, str]]:
    """The weight and name of each term. Raises :class:`groundwire.tools.plugins.UnknownNameError` where ``text`` is no
    sum.
    """
    terms: list[tuple[float, str]] = []
    at = 0
    while True:
        match = _TERM.match(text, at)
        if match is None:
            raise UnknownNameError(
                f"reward {text!r} cannot be read from {text[at:]!r} on: write a name, or a sum like {_EXAMPLE}"
            )
        weight, name = float(match["weight"] or 1), match["name"]
        if name in (each for _, each in terms):
            raise UnknownNameError(f"reward {text!r} names {name} twice: give it one weight")
        terms.append((weight, name))
        at = match.end()
        if at == len(text):
            return terms
        if text[at] != "+":
            raise UnknownNameError(
                f"reward {text!r} cannot be read from {text[at:]!r} on: terms are joined by +, like {_EXAMPLE}"
            )
        at += 1


def combine(terms: Sequence[tuple[float, str, Reward]]) -> Reward:
    """The weighted sum of some rewards, computed at the same time; where one cannot be, the sum cannot.

    A reward of one number gives a part of its name, one with parts ``name.part``; each is what it adds to the sum.
    Metrics stay as they are.
    """

    async def reward(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> dict[str, float]:
        work = [asyncio.ensure_future(each(task, answer, steps)) for _, _, each in terms]
        try:
            values = await asyncio.gather(*work)
        finally:
            for task_ in work:
                task_.cancel()
        parts: dict[str, float] = {}
        for (weight, name, _), value in zip(terms, values, strict=True):
            if not isinstance(value, Mapping):
                parts[name] = weight * value
                continue
            for part, number in value.items():
                if part.startswith(METRIC):
                    parts[f"{METRIC}{name}.{part.removeprefix(METRIC)}"] = number
                else:
                    parts[f"{name}.{part}"] = weight * number
        return parts

    return reward
