"""Rewards: plain async functions of ``(task, answer, steps)``, kept in one registry.

A reward answers with a float, or with named parts (``{"executes": 0.1, "judge": 0.7}``) that are summed and logged
one by one; a part named ``metric/…`` is logged and not summed. A wrong answer is a reward of 0; whatever keeps a reward
from being computed is raised as :class:`RewardError`, never turned into a number.
"""

from __future__ import annotations

from groundwire.rewards._registry import UnusableRewardError, check, get, names, notes
from groundwire.rewards._types import METRIC, JudgeAbstainedError, Reward, RewardError, total
from groundwire.rewards.judge.settings import JudgeSettings, JudgeSettingsError

__all__ = [
    "METRIC",
    "JudgeAbstainedError",
    "JudgeSettings",
    "JudgeSettingsError",
    "Reward",
    "RewardError",
    "UnusableRewardError",
    "check",
    "get",
    "names",
    "notes",
    "total",
]
