"""Execution match with partial credit, so that the rollouts of a small model's group differ before one is right.

    right    1.0
    wrong    up to 0.5: 0.125 each for executing, and for what it shares (F1) with the gold's tables, columns, clauses

A wrong query never gets more than half of a right one, however much it looks like the gold: the overlap is credit on
the way, not another way to win. There is none for a query that reads none of the gold's tables, or every group would
first learn ``SELECT 1``. A right query gets all parts, however it is written. The weights are sums of powers of
two, so that 0.5 and 1.0 are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.rewards._types import RewardError
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.rewards.spider.sql_parts import overlap, parts_of
from groundwire.tools.types import AgentStep

__all__ = ["dense", "spider_dense"]

_MATCH, _PARTIAL = 0.5, 0.125


async def spider_dense(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> dict[str, float]:
    """:func:`dense` of ``task["query"]`` on ``task["db_path"]``, in a thread. Raises :class:`rewards.RewardError`."""
    try:
        gold, database = task["query"], task["db_path"]
    except KeyError as error:
        raise RewardError(f"spider_dense needs {error} in the task; it has {', '.join(sorted(task))}") from error
    return await asyncio.to_thread(dense, answer, gold, database)


def dense(predicted: str, gold: str, database: str) -> dict[str, float]:
    """Parts ``match``, ``executes``, ``tables``, ``columns`` and ``clauses``; they sum up to 1.0, or to at most 0.5."""
    verdict = execution_match(predicted, gold, database)
    if verdict.score:
        shares = {"executes": 1.0, "tables": 1.0, "columns": 1.0, "clauses": 1.0}
    else:
        shares = _shares(predicted, gold, executed=verdict.executed)
    return {"match": _MATCH * verdict.score, **{name: _PARTIAL * share for name, share in shares.items()}}


def _shares(predicted: str, gold: str, *, executed: bool) -> dict[str, float]:
    ours, theirs = parts_of(gold), parts_of(predicted)
    if ours is None or theirs is None or not ours.tables & theirs.tables:
        return {"executes": 0.0, "tables": 0.0, "columns": 0.0, "clauses": 0.0}
    return {
        "executes": float(executed),
        "tables": overlap(ours.tables, theirs.tables),
        "columns": overlap(ours.columns, theirs.columns),
        "clauses": overlap(ours.clauses, theirs.clauses),
    }
