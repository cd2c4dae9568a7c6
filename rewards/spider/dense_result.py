"""Execution match with partial credit by results: a wrong query earns more the more its result has of the gold's.

    right    1.0
    wrong    0.25 times the similarity of the columns + 0.25 times that of the rows: at most 0.5

:mod:`groundwire.rewards.spider.result_similarity` defines the similarities. Unlike
:mod:`groundwire.rewards.spider.dense`, which compares the text of the queries, it pays any query that comes near the
result, however it is written. As there, a query that reads no table earns nothing if the gold reads one. The order of
rows has no influence on the partial credit. The weights are powers of two, so that 0.5 and 1.0 are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.rewards.spider.execution_match import (
    execution_match,
    gold_and_database,
    gold_rows,
    reads_table,
)
from groundwire.rewards.spider.result_similarity import similarity
from groundwire.tools.sql import QueryError, run_query
from groundwire.tools.types import AgentStep

__all__ = ["MAX_ROWS", "dense_result", "spider_dense_result"]

MAX_ROWS = 1000
"""Of longer results the first rows are compared, in the order of the result."""
_MAX_BYTES = 500_000
_MATCH, _PARTIAL = 0.5, 0.25


def dense_result(predicted: str, gold: str, database: str, *, timeout_s: float = 5.0) -> dict[str, float]:
    """Components ``match``, ``columns`` and ``rows``, with a sum of 1.0 or at most 0.5.

    ``timeout_s`` limits each query. Raises :class:`rewards.RewardError`.
    """
    result = execution_match(predicted, gold, database, timeout_s=timeout_s)
    columns = rows = result.score
    if not result.score and result.executed:
        columns, rows = _partial(predicted, gold, database, timeout_s)
    return {"match": _MATCH * result.score, "columns": _PARTIAL * columns, "rows": _PARTIAL * rows}


def _partial(predicted: str, gold: str, database: str, timeout_s: float) -> tuple[float, float]:
    """The similarities of the results of a wrong query."""
    predicted = predicted.rstrip("; \t\r\n")
    if not reads_table(database, predicted) and reads_table(database, gold):
        return 0.0, 0.0
    expected = gold_rows(gold, database, timeout_s)[:MAX_ROWS]
    try:
        result = run_query(database, predicted, timeout_s=timeout_s, max_rows=MAX_ROWS, max_bytes=_MAX_BYTES)
    except QueryError:
        return 0.0, 0.0
    return similarity(expected, result.rows)


async def spider_dense_result(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> dict[str, float]:
    """:func:`dense_result` of ``task["query"]`` on ``task["db_path"]``, in a thread."""
    return await asyncio.to_thread(dense_result, answer, *gold_and_database(task, "spider_dense_result"))
