"""Execution match: a prediction is right when its result equals the gold's, as Spider's official evaluator compares.

``official`` gives the verdicts that published figures stand on. ``safe``, the default, differs where a policy in
training would be paid for something else than answering:

- **It must read.** A write, PRAGMA, ATTACH, or a query that is no query (``;``) scores 0. Officially those run, and
  score 1 whenever the gold has no rows.
- **It must be one statement.** Officially ``gold; DROP TABLE t`` is judged by its first statement.
- **It must look at the data.** ``VALUES (3)`` scores 0 where the gold opens a table and the prediction does not.

Both modes share what keeps the judge alive: they only read, so no verdict depends on the pairs judged before; a query
ends at its deadline, and its rows, bytes and value lengths are bounded (0 beyond them, where the official evaluator
hangs or fills the memory); a prediction that makes sqlparse itself fail (blank, or nested too deeply) is judged by its
result. In ``official`` mode a statement that the engine refuses counts as one without rows, which is what a write
returns; it differs from the writable original for PRAGMA and RETURNING with rows and for writes that fail.
Exactly the given file is read, not every file beside it with ``.sqlite`` in its name.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from groundwire.rewards._types import RewardError
from groundwire.rewards.spider.official_rules import (
    ComparisonTimeoutError,
    Rows,
    first_statement,
    normalise,
    order_matters,
    same_result,
)
from groundwire.tools.sql import DatabaseError, NotAllowedError, QueryError, QueryTimeoutError, run_query
from groundwire.tools.types import AgentStep

__all__ = ["Verdict", "execution_match", "spider_exec_match"]

T = TypeVar("T")

_MAX_ROWS = 1_000_000
_MAX_BYTES = 64_000_000


@dataclass(frozen=True)
class Verdict:
    """``score`` is 1.0 or 0.0; ``reason`` is one line for people; ``executed``: the prediction gave a result."""

    score: float
    reason: str
    executed: bool = field(default=False, compare=False)


def execution_match(
    predicted: str,
    gold: str,
    database: str | Path,
    *,
    mode: Literal["safe", "official"] = "safe",
    timeout_s: float = 5.0,
) -> Verdict:
    """Judge ``predicted`` against ``gold`` on the SQLite file ``database``.

    ``timeout_s`` holds for each query and for the comparison. Raises :class:`rewards.RewardError` when the gold fails
    or the database cannot be read: the data is broken then, not the prediction.
    """
    if mode not in ("safe", "official"):
        raise ValueError(f"mode is 'safe' or 'official', not {mode!r}")
    path = os.fspath(database)
    gold, predicted = first_statement(normalise(gold)), normalise(predicted)
    predicted = first_statement(predicted) if mode == "official" else predicted.rstrip("; \t\r\n")
    file = (path, *_state(path))
    expected = _gold_rows(file, gold, timeout_s)
    key = (file, gold, predicted, mode, timeout_s)
    verdict = _verdicts.get(key)
    if verdict is None:
        try:
            verdict = _judge(path, predicted, gold, expected, mode, timeout_s)
        except (QueryTimeoutError, ComparisonTimeoutError) as error:
            # Not kept: a busy machine may be the cause, and the next time there is time.
            return Verdict(0.0, f"the prediction failed: {error}")
        _verdicts.put(key, verdict, size=500 + len(predicted) + len(gold))
    return verdict


def _judge(path: str, predicted: str, gold: str, expected: Rows, mode: str, timeout_s: float) -> Verdict:
    try:
        # One row more than the gold's is enough to know that they differ.
        rows: Rows = run_query(
            path, predicted, timeout_s=timeout_s, max_rows=len(expected) + 1, max_bytes=_MAX_BYTES
        ).rows
    except DatabaseError as error:
        raise RewardError(str(error)) from error
    except QueryTimeoutError:
        raise
    except NotAllowedError as error:
        if mode == "safe":
            return Verdict(0.0, str(error))
        rows = []
    except QueryError as error:
        return Verdict(0.0, f"the prediction failed: {error}")
    deadline = time.perf_counter() + timeout_s
    same = same_result(expected, rows, ordered=order_matters(gold), deadline=deadline)
    if mode == "safe" and same and predicted != gold and not _reads(path, predicted) and _reads(path, gold):
        return Verdict(0.0, "the prediction reads no table, the gold does", executed=True)
    return Verdict(float(same), f"the results {'are equal' if same else 'differ'}", executed=True)


async def spider_exec_match(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> float:
    """:func:`execution_match` in safe mode, of ``task["query"]`` on ``task["db_path"]``, in a thread."""
    try:
        gold, database = task["query"], task["db_path"]
    except KeyError as error:
        raise RewardError(f"spider_exec_match needs {error} in the task; it has {', '.join(sorted(task))}") from error
    verdict = await asyncio.to_thread(execution_match, answer, gold, database)
    return verdict.score


def _reads(path: str, sql: str) -> bool:
    """Whether the compiled query opens a table, asked of the engine; page 1 is the schema, and no table of the data."""
    try:
        program = run_query(path, f"EXPLAIN {sql}").rows
    except QueryError:
        return False
    return any(op == "VOpen" or (op == "OpenRead" and page > 1) for _, op, _, page, *_ in program)


class _Cache(Generic[T]):
    """Least recently used, bounded by the bytes that it is told: a group asks for the same gold, and often gives the
    same answer, many times in a row."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._entries: OrderedDict[tuple[Any, ...], tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[Any, ...]) -> T | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: tuple[Any, ...], value: T, *, size: int) -> None:
        with self._lock:
            if key not in self._entries:
                self._entries[key] = (value, size)
                self._left -= size
            while self._left < 0:
                self._left += self._entries.popitem(last=False)[1][1]


_golds: _Cache[Rows] = _Cache(max_bytes=32_000_000)
_verdicts: _Cache[Verdict] = _Cache(max_bytes=16_000_000)


def _state(path: str) -> tuple[int, ...]:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise RewardError(f"no database at {path}") from error
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)


def _gold_rows(file: tuple[Any, ...], gold: str, timeout_s: float) -> Rows:
    path = file[0]
    rows = _golds.get((file, gold))
    if rows is None:
        try:
            result = run_query(path, gold, timeout_s=timeout_s, max_rows=_MAX_ROWS, max_bytes=_MAX_BYTES)
        except QueryError as error:
            raise RewardError(f"the gold query failed on {path}: {error}: {gold}") from error
        if result.truncated:
            raise RewardError(f"the gold query gives more than {_MAX_ROWS} rows or {_MAX_BYTES} bytes: {gold}")
        rows = result.rows
        size = 500 + sum(map(sys.getsizeof, rows)) + sum(sys.getsizeof(value) for row in rows for value in row)
        _golds.put((file, gold), rows, size=size)
    return rows
