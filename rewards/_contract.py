"""What a reward is given and what it may answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tools.types import Step

__all__ = ["Reward", "RewardError", "total"]

Reward = Callable[[Mapping[str, Any], str, Sequence[Step]], Awaitable[float | dict[str, float]]]
"""``async (task, answer, trace) -> float | parts``. ``task`` is the row of the domain's data, gold included."""


class RewardError(Exception):
    """The reward could not be computed (a broken gold, a missing database): a typed failure, never a 0."""


def total(value: float | Mapping[str, float]) -> float:
    """The scalar that the trainer sees: the value itself, or the sum of its parts."""
    return float(sum(value.values())) if isinstance(value, Mapping) else float(value)
