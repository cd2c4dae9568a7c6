"""Attack a reward: does it pay an answer that is known to be wrong, before a policy finds out?

:func:`attack` lets strategies make answers for the tasks. A strategy's *pay* is the mean of (score - floor) / (score of
the right answer - floor), 0 to 1, over the tasks for which its answer is known to be wrong (:mod:`.truth`).
"""

from __future__ import annotations

from groundwire.rewards.attack.engine import attack
from groundwire.rewards.attack.forms import Gold, GoldFile
from groundwire.rewards.attack.result import (
    AttackExample,
    AttackResult,
    Finding,
    StrategyResult,
    code_hash,
    load_attack,
    save_attack,
)
from groundwire.rewards.attack.strategies import STRATEGIES, AttackAnswer, Context, Strategy
from groundwire.rewards.attack.truth import GoldTruth, Truth, UserTruth

__all__ = [
    "STRATEGIES",
    "AttackAnswer",
    "AttackExample",
    "AttackResult",
    "Context",
    "Finding",
    "Gold",
    "GoldFile",
    "GoldTruth",
    "Strategy",
    "StrategyResult",
    "Truth",
    "UserTruth",
    "attack",
    "code_hash",
    "load_attack",
    "save_attack",
]
