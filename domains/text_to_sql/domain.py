"""The base class of the domains whose answers are SQL queries, and how their questions are split.

If the data does not say which questions are for validation, the split is by database: questions about one database
share its tables, and often their golds. It depends only on the names of the databases, so it is the same on each
machine and after other questions were added.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groundwire.domains._readers import data_folder, database_problem, first_names
from groundwire.domains._types import DataError, Domain, Task, TaskData
from groundwire.domains.text_to_sql import prepared_folder
from groundwire.domains.text_to_sql.golds import Gold, GoldProblem, check_golds, leave_out
from groundwire.domains.text_to_sql.predictions import prediction_lines, write_files
from groundwire.tools.files import shorten_repr
from groundwire.tools.sql import SUFFIXES, has_suffix
from groundwire.tools.sql.answers import SQL
from groundwire.tools.text import printable

_log = logging.getLogger(__name__)
SPLIT_NAMES = {"dev": "validation", "val": "validation", "valid": "validation"}
"""Other names of the split ``validation``."""
_SHARE = 5


@dataclass
class Splits:
    """The tasks of a folder by split, how they were split, and where each task's row is.

    There is ``train``. Training validates on ``validation``, else on the first other split.
    """

    tasks: Mapping[str, list[Task]]
    note: str = ""
    where: Callable[[Task], str] = lambda task: f"task {task['id']}"


class SqlDomain(Domain):
    """Text-to-SQL. A task has at least id, db_id, question, query (the gold) and db_path (absolute).

    A domain says where its folder is and how it is read (:meth:`read`); loading, checking the golds and preparing are
    the same for all.
    """

    default_reward = "spider_exec_match"
    answers = SQL
    gold_columns: Sequence[str] = ("query", "hardness")
    content = "a folder of databases and questions"
    """What a folder of this domain holds, for people."""
    gold_timeout_s = 5.0
    names_broken_golds = False
    """Whether loading warns of each gold that cannot be run."""
    links_databases = False
    """Whether :meth:`prepare` links to the databases, which are too large to be copied."""

    def read(self, folder: Path, split: str = "") -> Splits:
        """The tasks of ``folder``: of all splits, or at least of ``train`` and ``split``. Raises :class:`DataError`."""
        raise NotImplementedError(f"the domain {self.name!r} has no method read(folder, split)")

    def folder(self, data_dir: str | None, option: str = "--data-dir") -> tuple[Path, str]:
        """The absolute path of the data, and where it comes from. Raises :class:`DataError`."""
        return data_folder(data_dir, option, domain=self.name, content=self.content)

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read the folder ``data_dir``. Raises :class:`DataError`."""
        return self.load_split("validation", data_dir)

    def load_split(self, split: str, data_dir: str | None = None) -> TaskData:
        """As :meth:`load`, with the tasks of ``split`` for validation."""
        folder, origin = self.folder(data_dir)
        splits = self.read(folder, split)
        names = [split, SPLIT_NAMES.get(split, split)]
        names += [other for other in splits.tasks if other != "train"] if split == "validation" else []
        if (name := next((name for name in names if name in splits.tasks), None)) is None:
            raise DataError(f"{folder} has no split {split!r}; it has {', '.join(splits.tasks)}.")
        train, validation, broken = splits.tasks["train"], splits.tasks[name], list[str]()
        if (left_out := prepared_folder.reported_left_out(folder)) is None:
            problems = check_golds([*train, *validation], timeout_s=self.gold_timeout_s)
            broken = prepared_folder.gold_errors(prepared_folder.broken_golds(splits, problems))
            train, validation, left_out = leave_out(train, validation, problems)
        for split_name, kept in {"train": train, name: validation}.items():
            if not kept:
                reason = broken[0] if broken else "add questions, or leave out the column split."
                raise DataError(f"{folder} has no {split_name} question whose gold can judge an answer: {reason}")
        for line in broken if self.names_broken_golds else ():
            _log.warning("%s", line)
        return TaskData(
            train=train,
            validation=validation,
            source=f"{origin}: train {_size_of(train)}, {name} {_size_of(validation)}{splits.note}",
            left_out=left_out,
            folder=None if self.bundled and folder == self.bundled.resolve() else str(folder),
        )

    def database(self, task: Task) -> str:
        """The absolute path of the task's SQLite file."""
        return str(task["db_path"])

    def write_predictions(self, folder: Path, tasks: Sequence[Task], answers: Mapping[str, str], sample: int) -> None:
        """Write the files of Spider's official evaluator."""
        write_files(folder, sample, "sql", prediction_lines(tasks, answers), tasks)

    def prepare(self, source: Path, out: Path) -> dict[str, Any]:
        """Write ``out`` from ``source``: the files of :meth:`files`, databases or links to them, and the files of
        :func:`write_folder`. Raises :class:`DataError`, or OSError when writing fails.
        """
        if not source.is_dir() and not source.is_file():
            problem = "is neither a folder nor a file" if source.exists() else "does not exist"
            raise DataError(f"--source {source} {problem}; name {self.content}.")
        with prepared_folder.replaced(out, source, self.written_by) as staging:
            splits = self.read(self.unpacked(source, staging))
            return prepared_folder.write_folder(staging / "new", self, splits, source.name)

    @property
    def written_by(self) -> str:
        """The mark of the folders that :meth:`prepare` wrote, and may replace."""
        return f"groundwire.domains.{self.name}"

    def unpacked(self, source: Path, staging: Path) -> Path:
        """The folder that :meth:`prepare` reads; ``staging`` has room for what an archive holds."""
        return self.folder(str(source), "--source")[0]

    def files(
        self, splits: Splits, problems: Mapping[Gold, GoldProblem]
    ) -> tuple[Mapping[str, list[Task]], dict[str, int]]:
        """The tasks of each parquet file that :meth:`prepare` writes, and the number left out of training."""
        train, _, left_out = leave_out(splits.tasks["train"], [], problems)
        judged = {name: leave_out([], tasks, problems)[1] for name, tasks in splits.tasks.items() if name != "train"}
        return {"train": train, **judged}, left_out

    def place(self, task: Task) -> str:
        """The path of a task's database in a prepared folder."""
        return f"databases/{task['db_id']}/{task['db_id']}.sqlite"


def database_files(place: Path) -> list[Path]:
    """Where the database may be whose name and folder is ``place``."""
    named = [file for file in place.glob("*") if file.stem == place.name and has_suffix(file)]
    return sorted(named, key=lambda file: (SUFFIXES.index(file.suffix.lower()), file.name))


def set_database_paths(
    tasks: Sequence[dict[str, Any]],
    folder: Path,
    places: Sequence[Path],
    *,
    remedy: str,
    source: str = "",
    build: Callable[[Path], Path] | None = None,
) -> None:
    """Make each task's ``db_path`` absolute: of the file that it names in ``folder``, else of one with its ``db_id``.

    That is looked for in the folders ``places``; ``build`` makes one of a ``schema.sql``. Raises :class:`DataError` for
    files that are missing, or no SQLite files.
    """
    keys = [(task["db_id"], task.get("db_path") or "") for task in tasks]
    files = {key: _find_database(*key, folder, places, build) for key in dict.fromkeys(keys)}
    if missing := {db_id for (db_id, _), file in files.items() if file is None}:
        raise DataError(
            f"{len(missing)} of {len({db_id for db_id, _ in keys})} databases{source} are missing "
            f"({first_names(missing)}): looked for <db_id>/<db_id>.sqlite{', .db and schema.sql' if build else ''} "
            f"under {' and '.join(map(str, places))}; {remedy}."
        )
    problems = {printable(str(file)): database_problem(file) for file in files.values() if file is not None}
    if broken := [f"{name}: {problem}" for name, problem in problems.items() if problem]:
        raise DataError(f"{len(broken)} databases are no readable SQLite files ({first_names(broken)}); {remedy}.")
    for task, key in zip(tasks, keys, strict=True):
        task["db_path"] = str(files[key])


def _find_database(
    db_id: str, db_path: str, folder: Path, places: Sequence[Path], build: Callable[[Path], Path] | None
) -> Path | None:
    if Path(db_id).name != db_id or db_id == ".." or "\0" in db_id + db_path:
        raise DataError(f"{folder}: the db_id {shorten_repr(db_id)} is not a plain name; repair the row.")
    if db_path and (folder / db_path).is_file():  # an absolute db_path stays as it is
        return (folder / db_path).resolve()
    files = [file for place in places for file in database_files(place / db_id)]
    if file := next((file for file in files if file.is_file()), None):
        return file.resolve()
    scripts = (place / db_id / "schema.sql" for place in places) if build else ()
    script = next((script for script in scripts if script.is_file()), None)
    if build and script:
        return build(script)
    return next((file for file in files if file.exists()), None)  # a pipe or the like, which the caller refuses


def split_tasks(tasks: Sequence[Task], source: str) -> tuple[dict[str, list[Task]], str]:
    """The tasks by split, and what decided.

    A column ``split`` wins. Without it a fifth of the databases, at least one, is for validation: those whose names
    have the lowest SHA-256. With one database it is a fifth of the gold queries, by their text without case and blanks.
    Raises :class:`DataError`.
    """
    named = [str(task["split"]) for task in tasks if task.get("split")]
    splits, how = named, "the column split"
    if named and len(named) < len(tasks):
        without = next(task for task in tasks if not task.get("split"))
        raise DataError(f"{source}: task {without['id']} has no split, and others have; name the split of each row.")
    if not named:
        names, how = [str(task["db_id"]) for task in tasks], "database"
        if len(set(names)) < 2:
            names = ["".join(str(task["query"]).lower().split()).rstrip(";") for task in tasks]
            how = "gold query, of one database"
        if len(set(names)) < 2:
            raise DataError(f"{source}: there is one gold query, so nothing can be held out; add questions.")
        ordered = sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())
        held_out = set(ordered[: max(1, round(len(ordered) / _SHARE))])
        splits = ["validation" if name in held_out else "train" for name in names]
    groups: dict[str, list[Task]] = {"train": [], "validation": []}
    for task, split in zip(tasks, splits, strict=True):
        groups.setdefault(split, []).append({**task, "split": split})
    return groups, how


def _size_of(tasks: Sequence[Task]) -> str:
    return f"{len(tasks):,} tasks ({len({task['db_id'] for task in tasks}):,} databases)"
