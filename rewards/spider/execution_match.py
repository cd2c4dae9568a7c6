"""Execution match: a prediction is right when its result equals the gold's, as Spider's official evaluator compares.

Mode ``official`` gives the scores that published results use. Mode ``safe``, the default, differs where a policy in
training would be rewarded without an answer:

- **It must read.** A write, PRAGMA, ATTACH or an empty statement (``;``) scores 0. Officially these run, and score 1
  whenever the gold has no rows.
- **It must be one statement.** Officially ``gold; DROP TABLE t`` is judged by its first statement.
- **It must use the data.** ``VALUES (3)`` scores 0 if the gold opens a table and the prediction does not.
- **In training it must not fit this database only.** ``SELECT 3 FROM singer`` may be right here; the reward in training
  also judges on the gold's variants (:mod:`groundwire.rewards._variants`).

In both modes queries only read, so no score depends on the pairs judged before. A query ends at its deadline, and its
rows, bytes and value lengths are bounded: it scores 0 beyond them, where the official evaluator hangs or fills the
memory. A prediction on which sqlparse itself fails (blank, or nested too deeply) is judged by its result. Mode
``official`` treats a statement that the engine refuses as one without rows, which is what a write returns; this differs
from the writable original for PRAGMA and RETURNING with rows and for writes that fail. Only the given file is read, not
every file in its folder with ``.sqlite`` in its name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cachetools import LRUCache, cached

from groundwire.rewards._types import RewardError, judges_sql
from groundwire.rewards._variants import (
    OfTraining,
    SqlAnswer,
    judged_on_variants,
    on_variants,
    sql_answer,
    training,
)
from groundwire.rewards.spider.official_rules import (
    ComparisonTimeoutError,
    Rows,
    first_statement,
    normalise,
    order_matters,
    same_result,
)
from groundwire.tools.sql import (
    MAX_JUDGED_BYTES,
    MAX_JUDGED_ROWS,
    DatabaseError,
    NotAllowedError,
    QueryError,
    QueryTimeoutError,
    run_query,
)
from groundwire.tools.types import AgentStep

__all__ = [
    "MatchResult",
    "execution_match",
    "gold_rows",
    "reads_table",
    "spider_exec_match",
    "spider_test_suite",
    "training_match",
]

_VIRTUAL_TABLES = "SELECT 1 FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL %' LIMIT 1"
File = tuple[str, int, int, int]
"""Path, inode, modification time in ns and size: a file that changed is another one."""


@dataclass(frozen=True)
class MatchResult:
    """``score`` is 1.0 or 0.0, ``reason`` one line for people."""

    score: float
    reason: str


def execution_match(
    predicted: str,
    gold: str,
    database: str | Path,
    *,
    mode: Literal["safe", "official"] = "safe",
    timeout_s: float = 5.0,
    keep_distinct: bool = False,
) -> MatchResult:
    """Compare the results of ``predicted`` and ``gold`` on the SQLite file ``database``.

    ``keep_distinct`` leaves DISTINCT in both, which the official evaluator drops by default. ``timeout_s`` limits each
    query and the comparison. Raises :class:`rewards.RewardError` if the gold fails or the database cannot be read: the
    data is broken then, not the prediction.
    """
    if mode not in ("safe", "official"):
        raise ValueError(f"mode is 'safe' or 'official', not {mode!r}")
    gold, predicted = first_statement(normalise(gold, keep_distinct)), normalise(predicted, keep_distinct)
    predicted = first_statement(predicted) if mode == "official" else predicted.rstrip("; \t\r\n")
    try:
        return _compare(_file(os.fspath(database)), predicted, gold, mode, timeout_s)
    except (QueryTimeoutError, ComparisonTimeoutError) as error:
        return MatchResult(0.0, f"the prediction failed: {error}")


def _comparison_key(file: File, predicted: str, gold: str, mode: str, timeout_s: float) -> tuple[Any, ...]:
    """With a hash of the texts: a policy in training writes long ones, and the cache must not keep them in memory."""
    texts = json.dumps([predicted, gold]).encode()
    return file, hashlib.blake2b(texts).digest(), mode, timeout_s


# A group asks for the same gold, and often gives the same answer, many times in a row. Errors are not cached: a query
# that times out on a busy machine may be in time later.
@cached(LRUCache(maxsize=16_384), key=_comparison_key, lock=threading.Lock())
def _compare(file: File, predicted: str, gold: str, mode: str, timeout_s: float) -> MatchResult:
    path, expected = file[0], _gold_rows(file, gold, timeout_s)
    try:
        # One row more than the gold's is enough to know that they differ.
        limit = len(expected) + 1
        rows: Rows = run_query(path, predicted, timeout_s=timeout_s, max_rows=limit, max_bytes=MAX_JUDGED_BYTES).rows
    except DatabaseError as error:
        raise RewardError(str(error)) from error
    except QueryTimeoutError:
        raise
    except NotAllowedError as error:
        if mode == "safe":
            return MatchResult(0.0, str(error))
        rows = []
    except QueryError as error:
        return MatchResult(0.0, f"the prediction failed: {error}")
    deadline = time.perf_counter() + timeout_s
    same = same_result(expected, rows, ordered=order_matters(gold), deadline=deadline)
    if mode == "safe" and same and predicted != gold and not reads_table(path, predicted) and reads_table(path, gold):
        return MatchResult(0.0, "the prediction reads no table, the gold does")
    return MatchResult(float(same), f"the results {'are equal' if same else 'differ'}")


def _size(rows: Rows) -> int:
    return 500 + sum(map(sys.getsizeof, rows)) + sum(sys.getsizeof(value) for row in rows for value in row)


@cached(LRUCache(maxsize=32_000_000, getsizeof=_size), key=lambda file, gold, _: (file, gold), lock=threading.Lock())
def _gold_rows(file: File, gold: str, timeout_s: float) -> Rows:
    path = file[0]
    try:
        result = run_query(path, gold, timeout_s=timeout_s, max_rows=MAX_JUDGED_ROWS, max_bytes=MAX_JUDGED_BYTES)
    except QueryError as error:
        raise RewardError(f"the gold query failed on {path}: {error}: {gold}") from error
    if result.truncated:
        raise RewardError(
            f"the gold query returns more than {MAX_JUDGED_ROWS} rows or {MAX_JUDGED_BYTES} bytes: {gold}"
        )
    return result.rows


def _file(path: str) -> File:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise RewardError(f"no database at {path}") from error
    return path, stat.st_ino, stat.st_mtime_ns, stat.st_size


def gold_rows(gold: str, database: str, timeout_s: float) -> Rows:
    """The rows of a gold query, from the cache of :func:`execution_match`. Raises :class:`rewards.RewardError`."""
    return _gold_rows(_file(database), gold, timeout_s)


def reads_table(path: str, sql: str) -> bool:
    """Whether the compiled query opens a table, by the engine's own plan; page 1 is the schema, not data.

    A virtual table counts if the database has one: ``json_each`` is in none.
    """
    try:
        program = run_query(path, f"EXPLAIN {sql}").rows
        if any(op == "OpenRead" and page > 1 for _, op, _, page, *_ in program):
            return True
        return any(op == "VOpen" for _, op, *_ in program) and bool(run_query(path, _VIRTUAL_TABLES).rows)
    except QueryError:
        return False


def training_match(answer: SqlAnswer) -> OfTraining:
    """:func:`execution_match` in safe mode on the database and on the gold's variants. Raises RewardError."""
    return on_variants(answer, execution_match(*answer[:3]).score, _variant_match)


def _variant_match(predicted: str, gold: str, variant: str) -> float:
    """The score with DISTINCT dropped from both, as officially, or as both are written.

    ``SELECT DISTINCT`` and ``IN`` have one meaning, and their results differ when DISTINCT is dropped. What safe mode
    adds does not depend on the rows, so the database has decided it.
    """
    score = execution_match(predicted, gold, variant, mode="official").score
    if not score and "distinct" in f"{predicted} {gold}".lower():
        score = execution_match(predicted, gold, variant, mode="official", keep_distinct=True).score
    return score


@judged_on_variants
async def spider_exec_match(
    task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]
) -> float | dict[str, float]:
    """:func:`execution_match` in safe mode, of ``task["query"]`` on ``task["db_path"]``, in a thread.

    In training it is :func:`spider_test_suite`.
    """
    if training():
        return await spider_test_suite(task, answer, steps)
    return (await asyncio.to_thread(execution_match, *sql_answer(task, answer, "spider_exec_match")[:3])).score


@judges_sql
async def spider_test_suite(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> dict[str, float]:
    """:func:`training_match`, in a thread: components ``match``, and as metrics ``official`` and ``unchecked``."""
    found = await asyncio.to_thread(training_match, sql_answer(task, answer, "spider_test_suite"))
    return found.components()
