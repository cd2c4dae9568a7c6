"""Rewards: plain async functions of ``(task, answer, trace)``, kept in one registry.

A reward answers with a float, or with named parts (``{"executes": 0.1, "judge": 0.7}``) that are summed and logged
one by one. A wrong answer is a reward of 0; whatever keeps a reward from being computed is raised as
:class:`RewardError`, never turned into a number.
"""

from __future__ import annotations

from rewards._contract import Reward, RewardError, total
from rewards._registry import check, get, names

__all__ = ["Reward", "RewardError", "check", "get", "names", "total"]
