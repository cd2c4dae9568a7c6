"""Execution match: a prediction is right when its result equals the gold's, as Spider's official evaluator compares.

Mode ``official`` gives the scores that published results use. Mode ``safe``, the default, differs where a policy in
training would be rewarded without an answer:

- **It must read.** A write, PRAGMA, ATTACH or an empty statement (``;``) scores 0. Officially these run, and score 1
  whenever the gold has no rows.
- **It must be one statement.** Officially ``gold; DROP TABLE t`` is judged by its first statement.
- **It must use the data.** ``VALUES (3)`` scores 0 if the gold opens a table and the prediction does not.
- **In training it must not fit this database only.** ``SELECT 3 FROM singer`` may be right here; the reward in training
  also judges on the gold's variants (:mod:`groundwire.rewards._sql`).

In both modes queries only read, so no score depends on the pairs judged before. A query ends at its deadline, and its
rows, bytes and value lengths are bounded: it scores 0 beyond them, where the official evaluator hangs or fills the
memory. A prediction on which sqlparse itself fails (blank, or nested too deeply) is judged by its result. Mode
``official`` treats a statement that the engine refuses as one without rows, which is what a write returns; this differs
from the writable original for PRAGMA and RETURNING with rows and for writes that fail. Only the given file is read, not
every file in its folder with ``.sqlite`` in its name.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import re
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cachetools import LRUCache, cached

from groundwire.rewards._sql import OfTraining, SqlAnswer, on_variants, sql_reward
from groundwire.rewards._types import RewardError
from groundwire.tools.sql import (
    MAX_JUDGED_BYTES,
    MAX_JUDGED_ROWS,
    DatabaseError,
    NotAllowedError,
    QueryError,
    QueryResult,
    QueryTimeoutError,
    read_catalog,
    readable,
    run_query,
    signature,
    sorted_row,
)
from groundwire.tools.text import printable

Row = tuple[Any, ...]
Rows = Sequence[Row]

# Tokens as sqlparse finds them, so that DISTINCT inside one is not taken for the word: comments, names in backticks or
# brackets, strings (in which \' is an escaped quote, unlike in SQLite), longer words.
_TOKEN = re.compile(
    r"""
      (?:--|\#\ )[^\r\n]* | /\*.*?\*/
    | `(?:``|[^`])*` | (?<![\w\])])\[[^\]\[]+\]
    | '(?:[^'\\]|''|\\'?)*' | "(?:[^"\\]|""|\\"?)*"
    | \w[$\#\w]*
    | ;
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|\[[^]]*\]""")
# In a comment the end of a line matters, and a random query has a result of its own each time.
_UNSURE = re.compile(r"--|/\*|random|[^\t\n\f\r -~]")
_NO_WORD = re.compile(r"\W")
_BLANKS = (" (", "("), ("( ", "("), (" )", ")"), (" ,", ","), (", ", ",")
_LONG = 5000  # bytes: of longer texts one may be within SQLite's limits, and another not
# The first table of a query is opened, whatever follows. SQLite compiles no subquery that cannot matter: ``SELECT 3
# WHERE 1 OR EXISTS (SELECT a FROM t)``, ``SELECT 3 WHERE 3 IN t``.
_FIRST_TABLE = re.compile(r"\s*select\b([^'\"`\[;]*?)\bfrom\s+(\w+)(?!\s*[.(]|\w)", re.IGNORECASE)
_NOT_FIRST = re.compile(r"\b(?:select|values|distinct)\b|--|/\*", re.IGNORECASE)
_THIS_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


def normalise(sql: str, keep_distinct: bool = False) -> str:
    """The query without blanks inside operators, without DISTINCT, in the year 2020 (rules 1, 2 and 4)."""
    sql = sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    lowered = sql.lower()
    if not keep_distinct and "distinct" in lowered:
        sql = _TOKEN.sub(lambda match: "" if match[0].lower() == "distinct" else match[0], sql)
    return _THIS_YEAR.sub("2020", sql) if "curdate" in lowered else sql


def first_statement(sql: str) -> str:
    """The text up to the first semicolon that ends a statement (rule 2)."""
    for match in _TOKEN.finditer(sql) if ";" in sql else ():
        # SQLite knows that a semicolon inside CREATE TRIGGER does not end the statement.
        if match[0] == ";" and sqlite3.complete_statement(sql[: match.end()]):
            return sql[: match.end()]
    return sql


def layout(sql: str) -> str:
    """The query without what has no meaning, so that queries of one layout have one result: blanks, the case of words.

    In a query with another one inside, a quoted name may be that of a column without one: its expression as written.
    """
    sql = sql.rstrip("; \t\r\n")
    lowered, quoted = sql.lower(), _QUOTED.findall(sql)
    names_text = lowered.count("select") > 1 and any(_NO_WORD.search(part, 1, len(part) - 1) for part in quoted)
    if names_text or len(sql) > _LONG or not sql.isascii() or _UNSURE.search(lowered):
        return sql
    words = " ".join((_QUOTED.sub("\0", lowered) if quoted else lowered).split())
    for blank, sign in _BLANKS:
        words = words.replace(blank, sign)
    return "\0".join([words, *quoted])


def same_result(gold: Rows, predicted: Rows, *, ordered: bool, deadline: float) -> bool:
    """Whether some order of the columns makes the results equal, as lists or as multisets of rows (rules 7 to 10).

    ``deadline`` is a time of :func:`time.perf_counter`. Raises ``QueryTimeoutError`` after it.
    """
    if not gold and not predicted:
        return True
    if len(gold) != len(predicted) or len(gold[0]) != len(predicted[0]):
        return False
    if len(gold[0]) == 1:
        return gold == predicted or (not ordered and Counter(gold) == Counter(predicted))
    if not _pass_quick_rejection(gold, predicted, ordered):
        return False
    if ordered:
        # Each column of one result must equal a column of the other; equality is transitive, so counting is enough.
        return Counter(zip(*gold, strict=True)) == Counter(zip(*predicted, strict=True))
    return Counter(gold) == Counter(predicted) or _columns_can_be_matched(gold, predicted, deadline)


def _pass_quick_rejection(gold: Rows, predicted: Rows, ordered: bool) -> bool:
    """Rule 8. It also decides results: 10 and 10.0 are equal, but sort differently in a row with 1."""
    if gold == predicted and marshal.dumps([*gold], 2) == marshal.dumps([*predicted], 2):  # a fifth of repr's time
        return True
    expected, returned = map(sorted_row, gold), map(sorted_row, predicted)
    return list(expected) == list(returned) if ordered else set(expected) == set(returned)


def _columns_can_be_matched(gold: Rows, predicted: Rows, deadline: float) -> bool:
    """Choose a predicted column for each gold column by backtracking; a choice is kept while the rows so far agree.

    Equal columns are tried once, or ``SELECT 0, 0, 0, 0, 0, 0, 0, 0, 0, 0`` would take 10^10 attempts.
    """
    targets, sources = list(zip(*gold, strict=True)), list(zip(*predicted, strict=True))
    target_counts = [Counter(column) for column in targets]
    source_counts = [Counter(column) for column in sources]
    candidates = [[s for s, count in enumerate(source_counts) if count == target] for target in target_counts]
    if not all(candidates):
        return False
    # The columns with the fewest candidates first.
    order = sorted(range(len(targets)), key=lambda t: len(candidates[t]))
    wanted = [targets[t] for t in order]

    def completes(chosen: list[int]) -> bool:
        """Whether ``wanted`` can begin with these columns, and go on with others."""
        if time.perf_counter() > deadline:
            raise QueryTimeoutError("the results were not compared by the deadline")
        depth = len(chosen)
        rows = zip(*(sources[s] for s in chosen), strict=True)
        if Counter(zip(*wanted[:depth], strict=True)) != Counter(rows):
            return False
        if depth == len(wanted):
            return True
        different = {sources[s]: s for s in candidates[order[depth]] if s not in chosen}
        return any(completes([*chosen, s]) for s in different.values())

    return completes([])


File = tuple[str, tuple[int, ...]]
"""Path and signature: a file that changed is another one."""


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
    predicted = normalise(predicted, keep_distinct)
    predicted = first_statement(predicted) if mode == "official" else predicted.rstrip("; \t\r\n")
    file, expected = _file(os.fspath(database)), _gold(gold, keep_distinct)
    try:
        return _compare(file, predicted, layout(predicted), expected, mode, timeout_s)
    except QueryTimeoutError as error:
        return MatchResult(0.0, f"the prediction failed: {error}")


class _Gold(NamedTuple):
    sql: str
    layout: str | None
    """None if the query has another result each time."""
    ordered: bool


@lru_cache(maxsize=1024)
def _gold(sql: str, keep_distinct: bool) -> _Gold:
    sql = first_statement(normalise(sql, keep_distinct))
    # Rule 3: the order matters if the normalised gold contains ``order by``, with one space.
    lowered = sql.lower()
    return _Gold(sql, None if "random" in lowered else layout(sql), "order by" in lowered)


def _comparison_key(
    file: File, _predicted: str, predicted_layout: str, gold: _Gold, mode: str, timeout_s: float
) -> tuple[Any, ...]:
    """With a hash of the text: a policy in training writes long ones, and the cache must not keep them in memory."""
    return file, hashlib.blake2b(predicted_layout.encode(errors="surrogatepass")).digest(), gold, mode, timeout_s


# A group asks for the same gold, and often gives the same answer, many times in a row. Errors are not cached: a query
# that times out on a busy machine may be in time later.
@cached(LRUCache(maxsize=16_384), key=_comparison_key, lock=threading.Lock())
def _compare(
    file: File, predicted: str, predicted_layout: str, gold: _Gold, mode: str, timeout_s: float
) -> MatchResult:
    path, expected = file[0], _gold_result(file, gold.sql, timeout_s).rows
    if predicted_layout == gold.layout:
        return MatchResult(1.0, "the queries are equal")
    limit = len(expected)
    try:
        result = run_query(
            path,
            predicted,
            timeout_s=timeout_s,
            max_rows=limit,
            max_bytes=MAX_JUDGED_BYTES,
            signature=file[1],
            count_steps=False,
        )
    except DatabaseError as error:
        raise RewardError(str(error)) from error
    except QueryTimeoutError:
        raise
    except NotAllowedError as error:
        if mode == "safe":
            return MatchResult(0.0, str(error))
        result = QueryResult([], [], truncated=False, elapsed_s=0.0)
    except QueryError as error:
        return MatchResult(0.0, f"the prediction failed: {error}")
    deadline = time.perf_counter() + timeout_s
    same = not result.truncated and same_result(expected, result.rows, ordered=gold.ordered, deadline=deadline)
    if mode == "safe" and same:
        first = _FIRST_TABLE.match(predicted)
        named = first and first[2].lower() in result.tables and not _NOT_FIRST.search(first[1])
        reads = named or reads_table(path, predicted)
        if not reads and reads_table(path, gold.sql):
            return MatchResult(0.0, "the prediction reads no table, the gold does")
    return MatchResult(float(same), f"the results {'are equal' if same else 'differ'}")


def _size(result: QueryResult) -> int:
    rows = result.rows
    return 500 + sum(map(sys.getsizeof, rows)) + sum(sys.getsizeof(value) for row in rows for value in row)


@cached(LRUCache(maxsize=32_000_000, getsizeof=_size), key=lambda file, gold, _: (file, gold), lock=threading.Lock())
def _gold_result(file: File, gold: str, timeout_s: float) -> QueryResult:
    path = file[0]
    try:
        result = run_query(path, gold, timeout_s=timeout_s, max_rows=MAX_JUDGED_ROWS, max_bytes=MAX_JUDGED_BYTES)
    except QueryError as error:
        raise RewardError(f"the gold query failed on {printable(path)}: {error}: {gold}") from error
    if result.truncated:
        raise RewardError(
            f"the gold query returns more than {MAX_JUDGED_ROWS} rows or {MAX_JUDGED_BYTES} bytes: {gold}"
        )
    return result


def _file(path: str) -> File:
    try:
        with readable(path):
            return path, signature(path)
    except DatabaseError as error:
        raise RewardError(str(error)) from error


def gold_result(gold: str, database: str, timeout_s: float) -> QueryResult:
    """The result of a gold query, from the cache of :func:`execution_match`. Raises :class:`rewards.RewardError`."""
    return _gold_result(_file(database), gold, timeout_s)


def reads_table(path: str, sql: str) -> bool:
    """Whether the compiled query opens a table, by the engine's own plan; page 1 is the schema, not data.

    A virtual table counts if the database has one: ``json_each`` is in none.
    """
    try:
        program = run_query(path, f"EXPLAIN {sql}").rows
        if any(op == "OpenRead" and page > 1 for _, op, _, page, *_ in program):
            return True
        opens_virtual = any(op == "VOpen" for _, op, *_ in program)
        return opens_virtual and any(table.kind == "virtual table" for table in read_catalog(path).tables.values())
    except QueryError:
        return False


def _score(predicted: str, gold: str, database: str) -> float:
    return execution_match(predicted, gold, database).score


def _variant_match(predicted: str, gold: str, variant: str) -> float:
    """The score with DISTINCT dropped from both, as officially, or as both are written.

    ``SELECT DISTINCT`` and ``IN`` have one meaning, and their results differ when DISTINCT is dropped. What safe mode
    adds does not depend on the rows, so the database has decided it.
    """
    score = execution_match(predicted, gold, variant, mode="official").score
    if not score and "distinct" in f"{predicted} {gold}".lower():
        score = execution_match(predicted, gold, variant, mode="official", keep_distinct=True).score
    return score


def training_match(answer: SqlAnswer) -> OfTraining:
    """:func:`execution_match` in safe mode on the database and on the gold's variants. Raises RewardError."""
    return on_variants(answer, _score(*answer[:3]), _variant_match)


spider_exec_match = sql_reward("spider_exec_match", _score, _variant_match)
spider_test_suite = sql_reward("spider_test_suite", _score, _variant_match, always=True)
