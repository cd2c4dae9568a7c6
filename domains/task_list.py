"""Your own tasks as a domain: rows of a list, a data frame or a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from groundwire.domains._readers import check_columns, check_rows, check_unique_ids, read_tasks
from groundwire.domains._types import DataError, Domain, Task, TaskData
from groundwire.domains.held_out import check_given, hold_out
from groundwire.tools.files import shorten_repr
from groundwire.tools.text import valid_text

_SUFFIXES = (".parquet", ".csv", ".tsv", ".json", ".jsonl", ".ndjson")
_DATABASE = ("database", "db_path")
_SPLIT, _SPLITS = "split", ("train", "validation")
_TEXTS = {"text_columns": ("question",), "optional_columns": _DATABASE}


class TaskList(Domain):
    """A domain with the given tasks. The reward says whether their answers are SQL."""

    name = "tasks"

    def __init__(
        self,
        tasks: list[Task],
        validation: list[Task] | float,
        *,
        source: str,
        group_column: str | None = None,
        allow_shared: bool = False,
    ) -> None:
        self._tasks, self._validation, self._source = tasks, validation, source
        train, held_out, how = tasks, validation, ""
        parts: dict[str, list[Task]] = {name: [] for name in _SPLITS}
        for task in tasks:
            if task.get(_SPLIT) in _SPLITS:
                parts[task[_SPLIT]].append({name: value for name, value in task.items() if name != _SPLIT})
        counts = list(map(len, parts.values()))
        if not isinstance(held_out, list) and group_column is None and all(counts) and sum(counts) == len(tasks):
            train, held_out = parts.values()
            how = f"as their column {_SPLIT} says"
        elif not isinstance(held_out, list):
            train, held_out, how = hold_out(tasks, held_out, source=source, column=group_column)
        elif not allow_shared:
            check_given(tasks, held_out)
        sizes = f"train {len(train):,} tasks, validation {len(held_out):,} tasks"
        self._data = TaskData(train=train, validation=held_out, source=f"{source}: {sizes}{', ' if how else ''}{how}")

    def split_as(self, *, group_column: str | None, allow_shared: bool) -> TaskList:
        """The same tasks under these settings of a run. Raises :class:`DataError`."""
        if group_column is None and not isinstance(self._validation, list):
            return self
        options: dict[str, Any] = {"group_column": group_column, "allow_shared": allow_shared}
        return TaskList(self._tasks, self._validation, source=self._source, **options)

    def load(self, data_dir: str | None = None) -> TaskData:
        """The tasks."""
        return self._data

    def database(self, task: Task) -> str:
        """The task's ``database`` or ``db_path``, as an absolute path."""
        path = next((task[name] for name in _DATABASE if task.get(name)), "")
        return os.path.abspath(path) if path else ""


def task_list(tasks: Any, *, validation: Any = 0.2, allow_shared: bool = False) -> TaskList:
    """The domain of ``tasks``: a list of mappings, a data frame, or the path of a parquet, CSV, JSON or JSONL file.

    A task has at least a ``question``; an ``id`` is made where it is missing. ``validation`` is more tasks, or the
    share of ``tasks`` that is held out (:mod:`groundwire.domains.held_out`), unless each has ``train`` or
    ``validation`` in its column ``split``. Raises :class:`DataError`, also for
    validation tasks with questions of ``tasks``, unless ``allow_shared``.
    """
    rows, source = _read(tasks, "tasks")
    if isinstance(validation, float | int) and not isinstance(validation, bool):
        return TaskList(rows, float(validation), source=source)
    return TaskList(rows, _read(validation, "validation")[0], source=source, allow_shared=allow_shared)


def is_file(name: str | Path) -> bool:
    """Whether ``name`` means a file of tasks, and not a domain."""
    return isinstance(name, Path) or name.lower().endswith(_SUFFIXES) or Path(name).is_file()


def _read(tasks: Any, name: str) -> tuple[list[Task], str]:
    """The tasks and the name of their source."""
    if isinstance(tasks, str | Path):
        file = Path(tasks)
        if not file.is_file():
            problem = "is not a file" if file.exists() else "does not exist"
            raise DataError(f"{file} {problem}: give the tasks as a list, a data frame, or a file of them")
        name, rows = valid_text(str(file)), read_tasks(file, **_TEXTS)
        for row in rows:  # a database may be given relative to the file
            paths = {column: file.parent / row[column] for column in _DATABASE if row.get(column)}
            row.update({column: str(path.absolute()) for column, path in paths.items() if path.exists()})
    else:
        rows = check_rows(_rows(tasks, name), source=name, name=name, **_TEXTS)
    check_unique_ids(rows, name)
    return list(rows), name


def _rows(tasks: Any, name: str) -> list[Any]:
    if hasattr(tasks, "__arrow_c_stream__"):  # a data frame of pandas or polars, a table of pyarrow
        import pyarrow as pa

        try:
            table = pa.table(tasks)
            check_columns(table.column_names, name)
            return list(table.to_pylist())
        except UnicodeEncodeError:  # pandas can hold half of a surrogate pair
            return list(tasks.to_dict("records"))
        except (pa.ArrowException, TypeError) as error:
            reason = " ".join(map(str, error.args[0] if isinstance(error.args[0], tuple) else error.args))
            raise DataError(f"{name}: the data frame cannot be read ({reason}); make each column one type.") from error
    if not isinstance(tasks, Iterable) or isinstance(tasks, Mapping | bytes):
        raise DataError(f"{name} is {shorten_repr(tasks)}: give a list of dicts, a data frame, or a file")
    return [dict(row) if isinstance(row, Mapping) else row for row in tasks]
