"""The reward of answers in prose: a rule and a judge.

    total = executes (0.1 if a query ran without an error, else 0) + judge (0.0 to 1.0): 0.0 to 1.1

A policy that is never right can learn the rule first; the rule cannot make a worse answer win by more than 0.1. The
judge's scores are logged as metrics. Without a judge's model a task with a gold query has, in place of ``executes``,
``rows``: 0.1 times the share of the gold's values that the rollout's queries read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.rewards._sql import executed, has_gold_query, sql_answer
from groundwire.rewards._types import METRIC, RewardError
from groundwire.rewards.judge.engine import Judge
from groundwire.rewards.judge.facts import share_read
from groundwire.rewards.judge.settings import JudgeSettings
from groundwire.tools.types import AgentStep

_EXECUTION_REWARD = 0.1
NO_REFERENCE = "--judge teacher=MODEL writes the missing ones, --judge without_reference=true judges without"
"""What to do about tasks without a reference answer."""


async def rule_judge_hybrid(
    task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep], *, judge: JudgeSettings
) -> dict[str, float]:
    """Components ``executes`` (or ``rows``) and ``judge``, at most 1.1 together, and a metric for each criterion.

    The task needs ``question`` and ``answer`` (the reference, in prose). A task without a reference gets the teacher's,
    or is judged without one, if the judge's settings say so. Raises :class:`rewards.RewardError` if a part is missing,
    and :class:`rewards.JudgeAbstainedError` if there is no verdict.
    """
    question, reference = str(task.get("question") or ""), str(task.get("answer") or "").strip()
    taught = not reference and judge.teacher is not None
    if taught:
        reference = await Judge.of(judge).reference(question)
    if not question or not (reference or judge.without_reference):
        missing = "answer" if question else "question"
        raise RewardError(
            f"rule_judge_hybrid needs {missing!r} in the task; it has {', '.join(sorted(task))}"
            + (f"; {NO_REFERENCE}" if question else "")
        )
    verdict = await Judge.of(judge).verdict(question=question, reference=reference, answer=answer)
    rule, share = "executes", float(executed(steps))
    if judge.model is None and has_gold_query(task):
        _, gold, database, _ = sql_answer(task, "", "rule_judge_hybrid")
        rule, share = "rows", await asyncio.to_thread(share_read, steps, gold, database)
    components = {rule: _EXECUTION_REWARD * share, "judge": verdict.score}
    components |= {f"{METRIC}{name}": score for name, score in verdict.scores.items()}
    if judge.teacher is not None:
        components[f"{METRIC}teacher_reference"] = float(taught)
    if verdict.spread is not None:
        components[f"{METRIC}judge_spread"] = verdict.spread
    return components
