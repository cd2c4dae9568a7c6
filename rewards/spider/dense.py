"""Execution match with partial credit: rewards within a group differ before the first rollout is right.

    right    1.0
    wrong    at most 0.5: 0.125 for executing, and 0.125 times the F1 with the gold's tables, columns and clauses each

A wrong query never earns more than half of a right one. A query that reads none of the gold's tables earns nothing, or
every group would first learn ``SELECT 1``. The weights are powers of two, so that 0.5 and 1.0 are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.rewards.spider.execution_match import execution_match, gold_and_database
from groundwire.rewards.spider.sql_parts import f1, parts_of
from groundwire.tools.types import AgentStep

__all__ = ["dense", "spider_dense"]

_MATCH, _PARTIAL = 0.5, 0.125


async def spider_dense(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> dict[str, float]:
    """:func:`dense` of ``task["query"]`` on ``task["db_path"]``, in a thread. Raises :class:`rewards.RewardError`."""
    return await asyncio.to_thread(dense, answer, *gold_and_database(task, "spider_dense"))


def dense(predicted: str, gold: str, database: str) -> dict[str, float]:
    """Components ``match``, ``executes``, ``tables``, ``columns`` and ``clauses``, with a sum of 1.0 or at most 0.5."""
    result = execution_match(predicted, gold, database)
    partial = dict.fromkeys(("executes", "tables", "columns", "clauses"), result.score)
    if not result.score:
        ours, theirs = parts_of(gold), parts_of(predicted)
        if ours and theirs and ours.tables & theirs.tables:
            partial = {
                "executes": float(result.executed),
                "tables": f1(ours.tables, theirs.tables),
                "columns": f1(ours.columns, theirs.columns),
                "clauses": f1(ours.clauses, theirs.clauses),
            }
    return {"match": _MATCH * result.score, **{name: _PARTIAL * share for name, share in partial.items()}}
