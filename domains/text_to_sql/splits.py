"""Which questions are for training and which for validation, if the data does not say it.

The split is by database: questions about one database share its tables, and often their golds. It depends only on the
names of the databases, so it is the same on each machine and after other questions were added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from groundwire.domains._types import DataError, Task

__all__ = ["SPLIT_NAMES", "size_of", "split_tasks"]

SPLIT_NAMES = {"dev": "validation", "val": "validation", "valid": "validation"}
"""Other names of the split ``validation``."""
_SHARE = 5


def split_tasks(tasks: Sequence[dict[str, Any]], source: str) -> tuple[dict[str, list[Task]], str]:
    """The tasks by split, and what decided.

    A column ``split`` wins. Without it a fifth of the databases, at least one, is for validation: those whose names
    have the lowest SHA-256. With one database it is a fifth of the gold queries, by their text without case and blanks.
    Raises :class:`DataError`.
    """
    named = [task for task in tasks if task.get("split")]
    if named:
        if len(named) < len(tasks):
            without = next(task for task in tasks if not task.get("split"))
            raise DataError(
                f"{source}: task {without['id']} has no split, and others have; name the split of each row."
            )
        return _group(tasks, [str(task["split"]) for task in tasks]), "the column split"
    databases = [str(task["db_id"]) for task in tasks]
    if len(set(databases)) > 1:
        held_out = _lowest(databases)
        return _group(tasks, [_split(name in held_out) for name in databases]), "database"
    golds = ["".join(str(task["query"]).lower().split()).rstrip(";") for task in tasks]
    if len(set(golds)) < 2:
        raise DataError(f"{source}: there is one gold query, so nothing can be held out; add questions.")
    held_out = _lowest(golds)
    return _group(tasks, [_split(gold in held_out) for gold in golds]), "gold query, of one database"


def size_of(tasks: Sequence[Task]) -> str:
    """How many tasks and databases they are, in words."""
    return f"{len(tasks):,} tasks ({len({task['db_id'] for task in tasks}):,} databases)"


def _split(held_out: bool) -> str:
    return "validation" if held_out else "train"


def _lowest(names: Iterable[str]) -> set[str]:
    ordered = sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())
    return set(ordered[: max(1, round(len(ordered) / _SHARE))])


def _group(tasks: Sequence[Task], splits: Sequence[str]) -> dict[str, list[Task]]:
    found: dict[str, list[Task]] = {"train": [], "validation": []}
    for task, split in zip(tasks, splits, strict=True):
        found.setdefault(split, []).append({**task, "split": split})
    return found
