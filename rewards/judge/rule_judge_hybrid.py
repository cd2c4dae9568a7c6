"""The reward of answers in prose: a rule and a judge.

    total = executes (0.1 if a query ran without an error, else 0) + judge (0.0 to 1.0): 0.0 to 1.1

A policy that is never right can learn the rule first; the rule cannot make a worse answer win by more than 0.1. The
judge's four scores are logged as metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.rewards._types import METRIC, RewardError
from groundwire.rewards.executes import executed
from groundwire.rewards.judge.engine import Judge
from groundwire.rewards.judge.settings import JudgeSettings
from groundwire.tools.types import AgentStep

__all__ = ["rule_judge_hybrid"]

_EXECUTION_REWARD = 0.1


async def rule_judge_hybrid(
    task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep], *, judge: JudgeSettings
) -> dict[str, float]:
    """Components ``executes`` and ``judge``, at most 1.1 together, and a metric for each criterion.

    The task needs ``question`` and ``answer`` (the reference, in prose). Raises :class:`rewards.RewardError` if one is
    missing, and :class:`rewards.JudgeAbstainedError` if there is no verdict.
    """
    try:
        question, reference = str(task["question"]), str(task["answer"])
    except KeyError as error:
        raise RewardError(f"rule_judge_hybrid needs {error} in the task; it has {', '.join(sorted(task))}") from error
    verdict = await Judge.of(judge).verdict(question=question, reference=reference, answer=answer)
    components = {"executes": _EXECUTION_REWARD * executed(steps), "judge": verdict.score}
    components |= {f"{METRIC}{name}": score for name, score in verdict.scores.items()}
    if verdict.spread is not None:
        components[f"{METRIC}judge_spread"] = verdict.spread
    return components
