"""Run the gold queries and leave out the tasks whose gold cannot judge an answer.

A gold that fails, is slow or returns too much to be compared can judge nothing: its tasks are left out of training and
validation. A gold that returns no rows is left out of training only, where it would reward any empty answer; published
accuracy counts it, and so does validation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from groundwire.domains._types import DataError, Task
from groundwire.tools.sql import (
    MAX_JUDGED_BYTES,
    MAX_JUDGED_ROWS,
    DatabaseError,
    QueryError,
    QueryTimeoutError,
    run_query,
)

__all__ = [
    "FAILS",
    "LARGE",
    "NO_ROWS",
    "SLOW",
    "Gold",
    "GoldProblem",
    "check_golds",
    "gold_error",
    "gold_of",
    "leave_out",
]

FAILS, SLOW, NO_ROWS = "gold fails", "gold is slow", "gold returns no rows"
LARGE = "gold returns too much"

Gold = tuple[str, str]
"""A database's absolute path, and a query."""


class GoldProblem(NamedTuple):
    """Why a gold cannot judge: ``FAILS``, ``SLOW``, ``LARGE`` or ``NO_ROWS``, and the database's error message."""

    reason: str
    detail: str = ""


def gold_of(task: Task) -> Gold:
    """The key of a gold's problem. Several questions may share a gold."""
    return task["db_path"], task["query"]


def check_golds(tasks: Iterable[Task], *, timeout_s: float = 5.0) -> dict[Gold, GoldProblem]:
    """Run every gold once, with a progress bar on a terminal, and return the problems.

    A gold is slow after ``timeout_s`` seconds. Raises :class:`DataError` for a database that cannot be read.
    """
    from groundwire.tools.terminal import progress

    golds = sorted({gold_of(task) for task in tasks})  # by database, so that one open connection serves all its golds
    problems = {}
    with progress("Running the golds", len(golds)) as advance:
        for gold in golds:
            if problem := _check_gold(*gold, timeout_s):
                problems[gold] = problem
            advance()
    return problems


def _check_gold(database: str, query: str, timeout_s: float) -> GoldProblem | None:
    try:
        result = run_query(database, query, timeout_s=timeout_s, max_rows=MAX_JUDGED_ROWS, max_bytes=MAX_JUDGED_BYTES)
    except QueryTimeoutError as error:
        return GoldProblem(SLOW, str(error))
    except DatabaseError as error:
        raise DataError(f"{error}; copy or download it again.") from error
    except QueryError as error:
        return GoldProblem(FAILS, str(error))
    if result.truncated:
        return GoldProblem(LARGE, f"more than {MAX_JUDGED_ROWS:,} rows or {MAX_JUDGED_BYTES // 10**6} MB")
    return None if result.rows else GoldProblem(NO_ROWS)


def gold_error(where: str, db_id: str, problem: GoldProblem) -> str:
    """One sentence about a gold that cannot be run; ``where`` is its row. Empty if it only returns no rows."""
    if problem.reason == NO_ROWS:
        return ""
    return f"{where} ({db_id}): {problem.reason}: {problem.detail}; correct the query, or remove the row."


def leave_out(
    train: list[Task], validation: list[Task], problems: Mapping[Gold, GoldProblem]
) -> tuple[list[Task], list[Task], dict[str, int]]:
    """The tasks for training, those for validation, and the number left out of training by reason."""
    counts = Counter(problems[gold_of(task)].reason for task in train if gold_of(task) in problems)
    kept = [task for task in train if gold_of(task) not in problems]
    judged = [task for task in validation if problems.get(gold_of(task), GoldProblem(NO_ROWS)).reason == NO_ROWS]
    return kept, judged, dict(counts)
