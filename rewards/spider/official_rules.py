"""How Spider's official evaluator normalises a query before running it, and compares two results.

Rules 1 to 10 of taoyds/test-suite-sql-eval (``eval_exec_match`` with plug_value=False, keep_distinct=False). The
official evaluator spends two thirds of its time on parsing SQL to drop one word, and tries up to n^n column orders. A
regular expression finds the word here, and columns are matched one by one: the same scores, a hundred times faster.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["ComparisonTimeoutError", "first_statement", "normalise", "order_matters", "same_result"]

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
_THIS_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


def normalise(sql: str, keep_distinct: bool = False) -> str:
    """The query without blanks inside operators, without DISTINCT, in the year 2020 (rules 1, 2 and 4)."""
    sql = sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    if not keep_distinct and "distinct" in sql.lower():
        sql = _TOKEN.sub(lambda match: "" if match[0].lower() == "distinct" else match[0], sql)
    return _THIS_YEAR.sub("2020", sql)


def first_statement(sql: str) -> str:
    """The text up to the first semicolon that ends a statement (rule 2)."""
    for match in _TOKEN.finditer(sql) if ";" in sql else ():
        # SQLite knows that a semicolon inside CREATE TRIGGER does not end the statement.
        if match[0] == ";" and sqlite3.complete_statement(sql[: match.end()]):
            return sql[: match.end()]
    return sql


def order_matters(gold: str) -> bool:
    """Rule 3: the normalised gold contains ``order by``, with one space."""
    return "order by" in gold.lower()


class ComparisonTimeoutError(Exception):
    """The columns could not be matched before the deadline."""


def same_result(gold: Rows, predicted: Rows, *, ordered: bool, deadline: float) -> bool:
    """Whether some order of the columns makes the results equal, as lists or as multisets of rows (rules 7 to 10).

    ``deadline`` is a time of :func:`time.perf_counter`. Raises :class:`ComparisonTimeoutError` after it.
    """
    if not gold and not predicted:
        return True
    if len(gold) != len(predicted) or len(gold[0]) != len(predicted[0]):
        return False
    if len(gold[0]) == 1:
        return gold == predicted if ordered else Counter(gold) == Counter(predicted)
    if not _pass_quick_rejection(gold, predicted, ordered):
        return False
    if ordered:
        # Each column of one result must equal a column of the other; equality is transitive, so counting is enough.
        return Counter(zip(*gold, strict=True)) == Counter(zip(*predicted, strict=True))
    return Counter(gold) == Counter(predicted) or _columns_can_be_matched(gold, predicted, deadline)


def _pass_quick_rejection(gold: Rows, predicted: Rows, ordered: bool) -> bool:
    """Rule 8. It also decides results: 10 and 10.0 are equal, but sort differently in a row with 1."""
    if gold == predicted and repr(gold) == repr(predicted):
        return True
    ours, theirs = map(_sorted_row, gold), map(_sorted_row, predicted)
    return list(ours) == list(theirs) if ordered else set(ours) == set(theirs)


def _sorted_row(row: Row) -> Row:
    return tuple(sorted(row, key=lambda value: str(value) + str(type(value))))


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
    chosen: list[int] = []

    def choices() -> Iterator[int]:
        tried: set[tuple[Any, ...]] = set()
        for source in candidates[order[len(chosen)]]:
            if source not in chosen and sources[source] not in tried:
                tried.add(sources[source])
                yield source

    stack = [choices()]
    while stack:
        if time.perf_counter() > deadline:
            raise ComparisonTimeoutError("the results were not compared by the deadline")
        del chosen[len(stack) - 1 :]
        source = next(stack[-1], None)
        if source is None:
            stack.pop()
            continue
        chosen.append(source)
        depth = len(chosen)
        if Counter(zip(*wanted[:depth], strict=True)) != Counter(zip(*(sources[s] for s in chosen), strict=True)):
            continue
        if depth == len(wanted):
            return True
        stack.append(choices())
    return False
