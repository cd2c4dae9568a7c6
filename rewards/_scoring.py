"""Scoring many answers at once, for the commands that look at a reward from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from groundwire.rewards._types import Reward, RewardError, total
from groundwire.tools.types import AgentStep

__all__ = ["Score", "each_at_once", "score"]

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 32


@dataclass(frozen=True)
class Score:
    """What a reward said of an answer: a number, or None and what kept it from one."""

    value: float | None
    error: str = ""


async def score(reward: Reward, task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> Score:
    """Ask ``reward``; whatever it raises is data here."""
    try:
        return Score(total(await reward(task, answer, steps)))
    except RewardError as error:
        return Score(None, str(error))
    except Exception as error:
        return Score(None, f"{type(error).__name__}: {error}")


async def each_at_once(
    work: Callable[[T], Awaitable[R]], items: Iterable[T], *, on_end: Callable[[], None] = lambda: None
) -> list[R]:
    """``work`` on every item, :data:`AT_ONCE` of them at a time; the results in the items' order."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> R:
        async with free:
            result = await work(item)
            on_end()
            return result

    return list(await asyncio.gather(*map(one, items)))
