"""The range that a reward declares, as Gymnasium's environments do: ``reward.reward_range = (-1, 1)``."""

from __future__ import annotations

import math
from typing import Any

from groundwire.rewards._types import UnusableRewardError

__all__ = ["declared_range"]


def declared_range(reward: Any) -> tuple[float, float]:
    """The least and the greatest value of ``reward``; one that declares none is taken to be between 0 and 1.

    Raises :class:`UnusableRewardError` if ``reward_range`` is not a pair of finite numbers.
    """
    inner = reward
    while inner is not None and not hasattr(inner, "reward_range"):  # a partial, of a reward with a judge, or a wrapper
        inner = getattr(inner, "func", getattr(inner, "__wrapped__", None))
    given = getattr(inner, "reward_range", (0.0, 1.0))
    try:
        least, greatest = map(float, given)
    except (TypeError, ValueError):
        least = greatest = math.nan
    if not (math.isfinite(least) and math.isfinite(greatest) and least <= greatest):
        raise UnusableRewardError(
            f"reward_range is {given!r:.100}; it must be like (-1, 1): the least and the greatest reward"
        )
    return least, greatest
