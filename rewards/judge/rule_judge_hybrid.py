"""Rule and judge: the reward of answers in prose, which no query result can be compared with.

    total = executes (0.1 where a query ran without an error, else 0) + judge (0.0 to 1.0), so from 0.0 to 1.1

The rule is small: it is what a policy that never answers right can learn first, and it cannot make a worse answer win
over a better one by more than 0.1. Beside the parts, the judge's four scores are logged as metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.rewards._types import METRIC, RewardError
from groundwire.rewards.executes import executed
from groundwire.rewards.judge.engine import Judge
from groundwire.rewards.judge.settings import JudgeSettings
from groundwire.tools.types import AgentStep

__all__ = ["EXECUTES", "rule_judge_hybrid"]

EXECUTES = 0.1
"""What a rollout earns for a query that ran without an error."""


async def rule_judge_hybrid(
    task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep], *, judge: JudgeSettings
) -> dict[str, float]:
    """``executes`` and ``judge``, which sum up to at most 1.1; metrics for each criterion.

    The task needs ``question`` and ``answer`` (the reference, in prose). Raises :class:`rewards.RewardError` where it
    has none, and :class:`rewards.JudgeAbstainedError` where there is no verdict.
    """
    try:
        question, reference = str(task["question"]), str(task["answer"])
    except KeyError as error:
        raise RewardError(f"rule_judge_hybrid needs {error} in the task; it has {', '.join(sorted(task))}") from error
    verdict = await Judge.of(judge).verdict(question=question, reference=reference, answer=answer)
    parts = {"executes": EXECUTES * executed(steps), "judge": verdict.score}
    parts |= {f"{METRIC}{name}": score for name, score in verdict.scores.items()}
    if verdict.spread is not None:
        parts[f"{METRIC}judge_spread"] = verdict.spread
    return parts
