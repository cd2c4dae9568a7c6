"""Scoring many answers at once, for the audit and for rescoring a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from groundwire.rewards._types import Reward, RewardError, total
from groundwire.tools.types import AgentStep

__all__ = ["Score", "map_concurrently", "score"]

T = TypeVar("T")
R = TypeVar("R")

_CONCURRENCY = 32


@dataclass(frozen=True)
class Score:
    """The reward of one answer; ``value`` is None where the reward raised ``error``."""

    value: float | None
    error: str = ""


async def score(reward: Reward, task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> Score:
    """Call ``reward`` and return whatever it raises as a :class:`Score`."""
    try:
        return Score(total(await reward(task, answer, steps)))
    except RewardError as error:
        return Score(None, str(error))
    except Exception as error:
        return Score(None, f"{type(error).__name__}: {error}")


async def map_concurrently(
    function: Callable[[T], Awaitable[R]], items: Iterable[T], *, on_end: Callable[[], None]
) -> list[R]:
    """The results of ``function`` in the items' order; ``on_end`` is called after each item."""
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def one(item: T) -> R:
        async with slots:
            result = await function(item)
            on_end()
            return result

    return list(await asyncio.gather(*map(one, items)))
