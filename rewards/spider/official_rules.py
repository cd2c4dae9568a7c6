"""What Spider's official evaluator does to a query before it runs it, and how it compares two results.

Rules 1 to 10 of taoyds/test-suite-sql-eval (``eval_exec_match`` with plug_value=False, keep_distinct=False), in our own
words. Two thirds of the official evaluator's time goes into parsing SQL to drop a single word, and its comparison
tries up to n^n column orders. Here a regular expression finds the word, and columns are matched: the verdict is the
same, a hundred times sooner.
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

# The parts of SQL in which the letters d-i-s-t-i-n-c-t are not the word, as sqlparse tells them apart: comments, names
# in backticks or brackets, strings (where it takes \' for an escaped quote, unlike SQLite), longer words.
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


def normalise(sql: str) -> str:
    """The query as it is judged: operators without a blank inside, no DISTINCT, the year 2020 (rules 1, 2 and 4)."""
    sql = sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    if "distinct" in sql.lower():
        sql = _TOKEN.sub(lambda match: "" if match[0].lower() == "distinct" else match[0], sql)
    return _THIS_YEAR.sub("2020", sql)


def first_statement(sql: str) -> str:
    """The text up to the first semicolon that ends a statement (rule 2)."""
    for match in _TOKEN.finditer(sql) if ";" in sql else ():
        # A semicolon inside CREATE TRIGGER ends nothing, and SQLite knows.
        if match[0] == ";" and sqlite3.complete_statement(sql[: match.end()]):
            return sql[: match.end()]
    return sql


def order_matters(gold: str) -> bool:
    """Rule 3: the normalised gold says ``order by``, with one space, anywhere at all."""
    return "order by" in gold.lower()


class ComparisonTimeoutError(Exception):
    """The columns could not be matched before the deadline."""


def same_result(gold: Rows, predicted: Rows, *, ordered: bool, deadline: float) -> bool:
    """Whether one order of the columns makes the results equal, as lists or as multisets of rows (rules 7 to 10).

    ``deadline`` is on the clock of :func:`time.perf_counter`. Raises :class:`ComparisonTimeoutError` past it.
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
        # Each column of one must be some column of the other: equality is transitive, so counting them is enough.
        return Counter(zip(*gold, strict=True)) == Counter(zip(*predicted, strict=True))
    return Counter(gold) == Counter(predicted) or _columns_can_be_matched(gold, predicted, deadline)


def _pass_quick_rejection(gold: Rows, predicted: Rows, ordered: bool) -> bool:
    """Rule 8. Not only quick: it decides, for 10 and 10.0 sort differently beside 1 though they are equal."""
    if gold == predicted and repr(gold) == repr(predicted):
        return True
    ours, theirs = map(_sorted_row, gold), map(_sorted_row, predicted)
    return list(ours) == list(theirs) if ordered else set(ours) == set(theirs)


def _sorted_row(row: Row) -> Row:
    return tuple(sorted(row, key=lambda value: str(value) + str(type(value))))


def _columns_can_be_matched(gold: Rows, predicted: Rows, deadline: float) -> bool:
    """Choose a predicted column for each gold column, left to right; a choice stands while the rows so far agree.

    Equal columns are tried once, which is what keeps ``SELECT 0, 0, 0, 0, 0, 0, 0, 0, 0, 0`` out of 10^10 attempts.
    """
    targets, sources = list(zip(*gold, strict=True)), list(zip(*predicted, strict=True))
    contents = [Counter(column) for column in targets]
    offers = [Counter(column) for column in sources]
    candidates = [[s for s, offer in enumerate(offers) if offer == content] for content in contents]
    if not all(candidates):
        return False
    # The most constrained columns first: they decide soonest.
    turn = sorted(range(len(targets)), key=lambda t: len(candidates[t]))
    wanted = [targets[t] for t in turn]
    chosen: list[int] = []

    def choices() -> Iterator[int]:
        tried: set[tuple[Any, ...]] = set()
        for source in candidates[turn[len(chosen)]]:
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
