"""What a reward is given and what it may answer."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from groundwire.tools.types import AgentStep

__all__ = ["METRIC", "JudgeAbstainedError", "Reward", "RewardError", "total"]

Reward = Callable[[Mapping[str, Any], str, Sequence[AgentStep]], Awaitable[float | dict[str, float]]]
"""``async (task, answer, steps) -> float | parts``. ``task`` is the row of the domain's data, gold included."""

METRIC = "metric/"
"""A part whose name begins with it is a figure to look at: it is logged beside the others, and not summed."""


class RewardError(Exception):
    """The reward could not be computed (a broken gold, a missing database): a typed failure, never a 0.

    RewardError
    └── JudgeAbstainedError   the judge gave no verdict; asking for another rollout would not help
    """

    kind = "reward"


class JudgeAbstainedError(RewardError):
    """The judge has no verdict: not reached, not readable, not in time, or not within the spending cap.

    It has tried again by itself, so the rollout is not run again: it is left out of its group, and counted.
    """

    kind = "judge_abstained"


def total(value: float | Mapping[str, float]) -> float:
    """The scalar that the trainer sees: the value itself, or the sum of its parts without the metrics.

    Raises :class:`RewardError` where that is no finite number.
    """
    try:
        if isinstance(value, Mapping):
            result = float(sum(part for name, part in value.items() if not name.startswith(METRIC)))
        else:
            result = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward is {value!r}; it must be a number, or numbers by the names of parts") from error
    if not math.isfinite(result):
        raise RewardError(f"the reward is {value!r}; it must be finite")
    return result
