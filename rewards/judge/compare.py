"""``judge:compare``: the answers of a group, ranked by a judge without references.

All different answers are in one request, in random order, and in a second one in reverse: an answer beats another if it
is better in both. So a group of any size costs two requests for each of the judge's ``samples``, and a judge that
prefers a place makes ties (``python -m benchmarks.judge_agreement --schemes`` compares this with pairs). The ranks by
wins, ties sharing theirs, are spread over 0 to 1: their mean is 0.5, and equal answers have no gradient.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

from groundwire.rewards._types import METRIC, JudgeAbstainedError, Reward, RewardError, comparison_of, components
from groundwire.rewards.judge.engine import Judge
from groundwire.rewards.judge.settings import JudgeSettings
from groundwire.tools.types import AgentStep

NAME = "judge:compare"
compared_later: ContextVar[bool] = ContextVar("compared_later", default=False)
"""Whether :func:`compare` will complete the rewards that are computed in this task of the event loop."""


async def judge_compare(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep], *, judge: Any) -> float:
    """0, to which :func:`compare` adds the rank. Raises :class:`rewards.RewardError` unless it will do so."""
    if not compared_later.get():
        raise RewardError(f"{NAME} ranks the answers to a task among themselves: one alone has no value")
    return 0.0


async def compare(
    task: Mapping[str, Any], answers: Sequence[str], *, judge: JudgeSettings, weight: float = 1.0, failed: int = 0
) -> list[dict[str, float]]:
    """As :func:`rewards.comparison_of` says: for each answer ``weight`` times its rank, 0 to 1, and a metric.

    Raises :class:`rewards.JudgeAbstainedError` if there is no verdict, or nothing to compare.
    """
    if not (question := str(task.get("question") or "")) or judge.model is None:
        raise RewardError(f"{NAME} needs {'a judge' if question else 'a question'}: the task has {', '.join(task)}")
    if (last := len(answers) + failed - 1) < 1:
        raise JudgeAbstainedError("there is no other answer to this task that it can be compared with")
    texts = [answer.strip() for answer in answers]
    standings = await Judge.of(judge).compare(question=question, answers=sorted(set(texts)))
    wins = sorted(standings[text][0] for text in texts)
    ranks = {win: failed + (bisect_left(wins, win) + bisect_right(wins, win) - 1) / 2 for win in wins}
    return [
        {NAME: weight * ranks[won] / last, f"{METRIC}{NAME}.contradicted": contradicted}
        for won, contradicted in map(standings.__getitem__, texts)
    ]


def against_gold(reward: Reward, gold: Callable[[Mapping[str, Any]], str]) -> Reward:
    """``reward`` for one answer at a time: one that compares answers compares it with ``gold(task)``. A tie is 0.5."""
    of_group: Any = comparison_of(reward)

    @wraps(reward)
    async def paired(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> dict[str, float]:
        compared_later.set(True)
        value = components(await reward(task, answer, steps))
        return value | (await of_group(task, [answer, gold(task)]))[0]

    return paired if of_group else reward
