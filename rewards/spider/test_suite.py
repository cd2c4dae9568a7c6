"""Execution match on the task's database and on its neighbours: variants that separate the gold from near misses.

A query without one of the gold's filters is often right on one database. Here it must also be right on each neighbour
that :mod:`groundwire.tools.neighbours` chose for the gold; ``prepare --neighbours`` makes them.

On a neighbour a prediction is right if its result equals the gold's with DISTINCT dropped from both, as officially, or
as both are written: ``SELECT DISTINCT`` and ``IN`` have one meaning, and their results differ when DISTINCT is dropped.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from groundwire.rewards._types import RewardError, judges_sql
from groundwire.rewards.spider.execution_match import MatchResult, execution_match, gold_and_database
from groundwire.tools.neighbours import NeighboursError, neighbours_of
from groundwire.tools.types import AgentStep

__all__ = ["spider_test_suite", "suite_match"]

_TOKEN = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|\[[^]]*\]|--.*|/\*|\w+|\S""")


def suite_match(predicted: str, gold: str, database: str, *, timeout_s: float = 5.0) -> MatchResult:
    """:func:`execution_match` in safe mode on ``database`` and on the gold's neighbours; all must be right.

    The reason names the first database on which the prediction is wrong. ``timeout_s`` limits each query. Raises
    :class:`rewards.RewardError`, also if there are no neighbours.
    """
    try:
        neighbours = neighbours_of(database, gold)
    except NeighboursError as error:
        raise RewardError(str(error)) from error
    result = execution_match(predicted, gold, database, timeout_s=timeout_s)
    if not result.score or _tokens(predicted) == _gold_tokens(gold):
        return result
    for neighbour in neighbours:
        # What safe mode adds does not depend on the rows, so the first database has decided it.
        match = partial(execution_match, predicted, gold, neighbour, mode="official", timeout_s=timeout_s)
        found = match()
        if not found.score and "distinct" in f"{predicted} {gold}".lower():
            found = match(keep_distinct=True)
        if not found.score:
            return MatchResult(0.0, f"right on {database}; on its neighbour {neighbour} {found.reason}", executed=True)
    return result


def _tokens(sql: str) -> list[str]:
    """The query without the case of its words, its blanks and its last semicolon; a comment is one token."""
    return [each if each[0] in "'\"`[" else each.lower() for each in _TOKEN.findall(sql.rstrip("; \t\r\n"))]


_gold_tokens = lru_cache(maxsize=4096)(_tokens)


@judges_sql
async def spider_test_suite(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
    """:func:`suite_match` of ``task["query"]`` on ``task["db_path"]``, in a thread."""
    return (await asyncio.to_thread(suite_match, answer, *gold_and_database(task, "spider_test_suite"))).score
