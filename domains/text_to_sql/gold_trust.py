"""``--gold-trust FILE``: train less on tasks whose golds are probably wrong, and on corrected golds.

The file is ``suspects.json`` of ``prepare`` or of the audit, as written or corrected by hand: a higher or lower
``trust``, or a ``corrected_query``. A task stays with the probability of its trust, so that in the mean it weighs as
much as it is trusted; one that the file does not list stays.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from groundwire.domains._readers import read_json
from groundwire.domains._types import DataError, Task, TaskData
from groundwire.domains.text_to_sql.golds import check_golds, gold_of
from groundwire.tools.files import first_error, shorten_repr

__all__ = ["with_gold_trust"]


class _Row(BaseModel):
    id: str
    query: str
    trust: Annotated[float, Field(ge=0, le=1)]
    corrected_query: str = ""


_ROWS = TypeAdapter(list[_Row])


def with_gold_trust(data: TaskData, file: Path, *, seed: int = 0) -> tuple[TaskData, str]:
    """The data with the training tasks that stay, and a note of what changed. The same seed keeps the same tasks.

    A row counts for the training task with its ``id``, if that has its ``query`` as gold. Raises :class:`DataError`.
    """
    rows = _read(file)
    kept: list[Task] = []
    corrected: list[Task] = []
    listed = 0
    for task in data.train:
        row = rows.get((str(task["id"]), task.get("query")))
        listed += row is not None
        if row is not None and row["corrected_query"]:
            corrected.append({**task, "query": row["corrected_query"]})
            kept.append(corrected[-1])
        elif row is None or random.Random(f"{seed}/{task['id']}").random() < row["trust"]:
            kept.append(task)
    if not listed:
        raise DataError(f"{file} lists no training task of {data.source}: name the file that was made of this data.")
    _check(corrected, file)
    left_out = len(data.train) - len(kept)
    note = f"{left_out:,} of {len(data.train):,} training tasks are left out, {len(corrected):,} golds corrected"
    return replace(data, train=kept), note


def _read(file: Path) -> dict[tuple[str, Any], dict[str, Any]]:
    rows = read_json(file)
    if problem := first_error(_ROWS, rows):
        raise DataError(f"{file}: {problem}; it must be a list of rows as in suspects.json.")
    return {(row["id"], row["query"]): {"corrected_query": "", **row} for row in rows}


def _check(corrected: Iterable[Task], file: Path) -> None:
    """Raise :class:`DataError` for a corrected gold that cannot judge an answer."""
    tasks = list(corrected)
    if problems := check_golds(tasks):
        task = next(task for task in tasks if gold_of(task) in problems)
        problem = problems[gold_of(task)]
        raise DataError(
            f"{file}, task {task['id']}: corrected_query {shorten_repr(task['query'])}: {problem.reason}"
            f"{f' ({problem.detail})' if problem.detail else ''}; correct it, or give trust 0."
        )
