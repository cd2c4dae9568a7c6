"""The type of a reward, and its errors.

RewardError               the reward of one rollout could not be computed
└── JudgeAbstainedError   because the judge gave no verdict
UserError
├── UnknownNameError
│   └── UnusableRewardError   the reward's function cannot be imported or called
└── JudgeSettingsError        (judge.settings) a setting of the judge is unknown or out of range
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from groundwire.tools.plugins import UnknownNameError
from groundwire.tools.types import AgentStep

__all__ = ["METRIC", "JudgeAbstainedError", "Reward", "RewardError", "UnusableRewardError", "total"]

Reward = Callable[[Mapping[str, Any], str, Sequence[AgentStep]], Awaitable[float | dict[str, float]]]
"""``async (task, answer, steps) -> float | components``. ``task`` is the row of the domain's data, gold included."""

METRIC = "metric/"
"""The prefix of components that are logged but not summed."""


class RewardError(Exception):
    """The reward could not be computed (a broken gold, a missing database): a typed failure, never a 0."""

    kind = "reward"


class JudgeAbstainedError(RewardError):
    """The judge gave no verdict: unreachable, unreadable, too late, or over its spending cap.

    The judge has already retried, so the rollout does not run again: it is left out of its group, and counted.
    """

    kind = "judge_abstained"


class UnusableRewardError(UnknownNameError):
    """The reward of a name cannot be imported, or cannot be called with ``(task, answer, steps)``."""


def total(value: float | Mapping[str, float]) -> float:
    """The trainer's scalar: the value, or the sum of its components without the metrics.

    Raises :class:`RewardError` if the result is not a finite number.
    """
    try:
        if isinstance(value, Mapping):
            result = float(sum(number for name, number in value.items() if not name.startswith(METRIC)))
        else:
            result = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward is {value!r}; it must be a number, or a dict of named numbers") from error
    if not math.isfinite(result):
        raise RewardError(f"the reward is {value!r}; it must be finite")
    return result
