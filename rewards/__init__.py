"""Rewards: async functions of ``(task, answer, steps)`` in one registry.

A reward returns a float, or named components (``{"executes": 0.1, "judge": 0.7}``), which are logged one by one and
summed; a component named ``metric/…`` is logged but not summed. A wrong answer scores 0. A reward that cannot be
computed raises :class:`RewardError` and never becomes a number.
"""

from __future__ import annotations

from groundwire.rewards._columns import RecordedTask, names_read
from groundwire.rewards._functions import (
    Score,
    describe_call,
    map_concurrently,
    reward_function,
    score,
    with_time_limit,
)
from groundwire.rewards._registry import check, comparison, get, has_functions, names, notes
from groundwire.rewards._sql import has_variants, in_training, unchecked_of, without_variants
from groundwire.rewards._types import (
    ABOUT_THE_ANSWER,
    METRIC,
    JudgeAbstainedError,
    Reward,
    RewardError,
    UnusableRewardError,
    answers_of,
    comparison_of,
    components,
    declared_range,
    judges_sql,
    total,
)
from groundwire.rewards.judge.settings import JudgeSettings, JudgeSettingsError

__all__ = [
    "ABOUT_THE_ANSWER",
    "METRIC",
    "JudgeAbstainedError",
    "JudgeSettings",
    "JudgeSettingsError",
    "RecordedTask",
    "Reward",
    "RewardError",
    "Score",
    "UnusableRewardError",
    "answers_of",
    "check",
    "comparison",
    "comparison_of",
    "components",
    "declared_range",
    "describe_call",
    "get",
    "has_functions",
    "has_variants",
    "in_training",
    "judges_sql",
    "map_concurrently",
    "names",
    "names_read",
    "notes",
    "reward_function",
    "score",
    "total",
    "unchecked_of",
    "with_time_limit",
    "without_variants",
]
