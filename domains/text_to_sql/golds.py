"""Run the gold queries and leave out the tasks whose gold cannot judge an answer.

A gold that fails, is slow or returns too much to be compared can judge nothing: its tasks are left out of training and
validation. A gold that returns no rows is left out of training only, where it would reward any empty answer; published
accuracy counts it, and so does validation.

``--gold-trust FILE`` trains less on tasks whose golds are probably wrong, and on corrected golds. The file is
``suspects.json`` of ``prepare`` or of the audit, as written or corrected by hand: a higher or lower ``trust``, or a
``corrected_query``. A task stays with the probability of its trust, so that in the mean it weighs as much as it is
trusted; one that the file does not list stays.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter

from groundwire.domains._readers import read_json
from groundwire.domains._types import DataError, Task, TaskData
from groundwire.tools.files import first_error, shorten_repr
from groundwire.tools.sql import (
    MAX_JUDGED_BYTES,
    MAX_JUDGED_ROWS,
    DatabaseError,
    QueryError,
    QueryTimeoutError,
    run_query,
)

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


def leave_out(
    train: list[Task], validation: list[Task], problems: Mapping[Gold, GoldProblem]
) -> tuple[list[Task], list[Task], dict[str, int]]:
    """The tasks for training, those for validation, and the number left out of training by reason."""
    counts = Counter(problems[gold_of(task)].reason for task in train if gold_of(task) in problems)
    kept = [task for task in train if gold_of(task) not in problems]
    judged = [task for task in validation if problems.get(gold_of(task), GoldProblem(NO_ROWS)).reason == NO_ROWS]
    return kept, judged, dict(counts)


class _SuspectRow(BaseModel):
    id: str
    query: str
    trust: Annotated[float, Field(ge=0, le=1)]
    corrected_query: str = ""


_ROWS = TypeAdapter(list[_SuspectRow])


def with_gold_trust(data: TaskData, file: Path, *, seed: int = 0) -> tuple[TaskData, str]:
    """The data with the training tasks that stay, and a note of what changed. The same seed keeps the same tasks.

    A row counts for the training task with its ``id``, if that has its ``query`` as gold. Raises :class:`DataError`.
    """
    if not any(task.get("query") and task.get("db_path") for task in data.train):
        raise DataError(f"gold_trust is for gold queries, and {data.source} has none: leave it out")
    listed_rows = read_json(file)
    if problem := first_error(_ROWS, listed_rows):
        raise DataError(f"{file}: {problem}; it must be a list of rows as in suspects.json.")
    rows = {(row["id"], row["query"]): row for row in listed_rows}
    kept: list[Task] = []
    corrected: list[Task] = []
    for task in data.train:
        row = rows.get((str(task["id"]), task.get("query")), {})
        if query := row.get("corrected_query"):
            corrected.append({**task, "query": query})
            kept.append(corrected[-1])
        elif random.Random(f"{seed}/{task['id']}").random() < row.get("trust", 1):
            kept.append(task)
    if rows and rows.keys().isdisjoint((str(task["id"]), task.get("query")) for task in data.train):
        raise DataError(f"{file} lists no training task of {data.source}: name the file that was made of this data.")
    if problems := check_golds(corrected):
        task = next(task for task in corrected if gold_of(task) in problems)
        reason, detail = problems[gold_of(task)]
        raise DataError(
            f"{file}, task {task['id']}: corrected_query {shorten_repr(task['query'])}: {reason}"
            f"{f' ({detail})' if detail else ''}; correct it, or give trust 0."
        )
    left_out = len(data.train) - len(kept)
    note = f"{left_out:,} of {len(data.train):,} training tasks are left out, {len(corrected):,} golds corrected"
    return replace(data, train=kept), note
