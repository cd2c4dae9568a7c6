"""``--domain sqlite --data-dir FOLDER``: questions about your own SQLite databases, answered with SQL.

The folder has SQLite files, anywhere below it, and questions. These are in one file, ``questions.jsonl``, ``.csv``,
``.parquet`` or ``.json``, or the only JSON-lines, CSV or parquet file of the folder; or in the layout of KaggleDBQA
(Lee et al., ACL 2021): ``examples/*.json`` beside a ``*_tables.json``, where the files ``*_fewshot`` are its questions
for training and ``*_test`` those for validation.

Every gold query is run when the data is read, unless :mod:`groundwire.domains.prepare` wrote the folder; tasks whose
gold cannot judge an answer are left out as for Spider, and each broken gold is named with its row.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groundwire.domains._readers import SUFFIXES, check_databases, check_unique_ids, first_names, read_tasks
from groundwire.domains._types import DataError, Task
from groundwire.domains.spider.hardness import LEVELS, hardness
from groundwire.domains.text_to_sql.domain import SPLIT_NAMES, Splits, SqlDomain, split_tasks
from groundwire.domains.text_to_sql.golds import Gold, GoldProblem, check_golds, gold_error, gold_of, leave_out
from groundwire.domains.text_to_sql.prepared_folder import reported_left_out
from groundwire.tools.files import shorten_repr

_SENTENCES = 20
_log = logging.getLogger(__name__)
_FILES = ("questions.jsonl", "questions.csv", "questions.parquet", "questions.json")
_SUFFIXES = (".jsonl", ".csv", ".parquet")
_QUERY = ("query", "sql", "SQL", "gold_sql", "gold")
_DATABASE = ("database", "db_path", "db_id", "db")
_PARTS = {"_fewshot": "train", "_test": "validation"}
_PLAIN = (str, int, float, type(None))
"""Of the columns that a task keeps: no parse trees and token lists."""


class SqliteDomain(SqlDomain):
    """Text-to-SQL on a folder of yours. A task has id, split, db_id, question, query, db_path, hardness, and others."""

    name = "sqlite"
    breakdowns = {"hardness": {level: level for level in LEVELS}}

    def read(self, folder: Path, split: str = "") -> Splits:
        """The tasks of all questions."""
        tasks, places = _read_questions(folder)
        splits, split_by = split_tasks(tasks, str(folder))
        return Splits(splits, f", split by {split_by}", where=lambda task: places[task["id"]])

    def checked(self, folder: Path, splits: Splits, split: str) -> tuple[list[Task], list[Task], dict[str, int]]:
        """As of all domains; a broken gold is named, for they are the user's own."""
        train, validation = splits.tasks["train"], splits.tasks[split]
        left_out, broken = reported_left_out(folder), list[str]()
        if left_out is None:
            problems = check_golds([*train, *validation])
            golds = [
                {"where": splits.where(task), "db_id": task["db_id"], **problem._asdict()}
                for task in (*train, *validation)
                if (problem := problems.get(gold_of(task)))
            ]
            broken = list(filter(None, map(gold_error, golds)))
            train, validation, left_out = leave_out(train, validation, problems)
        for name, kept in {"train": train, split: validation}.items():
            if not kept:
                reason = broken[0] if broken else "add questions, or leave out the column split."
                raise DataError(f"{folder} has no {name} question whose gold can judge an answer: {reason}")
        for line in broken[:_SENTENCES]:
            _log.warning("%s", line)
        if (more := len(broken) - _SENTENCES) > 0:
            _log.warning("%d more golds cannot judge an answer; groundwire prepare lists them", more)
        return train, validation, left_out

    def database_folders(self, data_dir: str | None = None) -> list[Path]:
        """The folder of the data, and its databases, which may be links."""
        folder, _ = self.folder(data_dir)
        return [folder, *(Path(database.path) for database in DatabaseFolder(folder).all)]

    def files(
        self, splits: Splits, problems: Mapping[Gold, GoldProblem]
    ) -> tuple[Mapping[str, list[Task]], dict[str, int]]:
        """One file, ``questions.parquet``, with the column ``split``."""
        others = [task for name, tasks in splits.tasks.items() if name != "train" for task in tasks]
        kept, judged, left_out = leave_out(splits.tasks["train"], others, problems)
        return {"questions": [*kept, *judged]}, left_out


domain = SqliteDomain()


@dataclass(frozen=True)
class DatabaseFile:
    """A SQLite file, a name that no other of the folder has, and its path in the folder."""

    db_id: str
    path: str
    place: str


class DatabaseFolder:
    """All SQLite files below ``folder``. Raises :class:`DataError` if there are none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        if not files:
            raise DataError(f"{folder} has no SQLite file ({', '.join(SUFFIXES)}); add the databases.")
        stems = Counter(path.stem for path in files)
        self._by_name = defaultdict[str, list[DatabaseFile]](list)
        for path in files:
            place = path.relative_to(folder)
            unique = path.stem if stems[path.stem] == 1 else "-".join(place.parts)
            database = DatabaseFile(unique, str(path.resolve()), place.as_posix())
            for name in {database.place, path.name, path.stem}:
                self._by_name[name].append(database)
        self.all = list({file.path: file for files in self._by_name.values() for file in files}.values())

    def find(self, name: str | None, where: str) -> DatabaseFile:
        """The database that the row ``where`` names: its path in the folder, its file's name, with or without suffix.

        Without a name it is the only database. Raises :class:`DataError`.
        """
        if not name:
            if len(self.all) > 1:
                raise DataError(f"{where} names no database, and there are {len(self.all)}; add the column database.")
            return self.all[0]
        matches, called = self._by_name.get(name, []), shorten_repr(name)
        if not matches:
            names = first_names(database.db_id for database in self.all)
            raise DataError(f"{where}: {self._folder} has no database {called}; it has {names}.")
        if len(matches) > 1:
            paths = " and ".join(database.place for database in matches)
            raise DataError(f"{where}: {len(matches)} databases are called {called} ({paths}); give its path.")
        return matches[0]


def _read_questions(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tasks of ``folder``, and the place of each task's row by its id, such as ``questions.csv, row 3``.

    A task has id, db_id, question, query, db_path (absolute), hardness, ``split`` if its row has one, and the row's
    other columns of text or numbers. Rows are counted from 0. Raises :class:`DataError`.
    """
    databases, used = DatabaseFolder(folder), (*_QUERY, *_DATABASE, "split")
    tasks, places = [], {}
    for file, split in _find_files(folder):
        rows = read_tasks(file, text_columns=("question",))
        query_column = _query_column(file, rows)
        database_column = next((name for name in _DATABASE if any(row.get(name) for row in rows)), _DATABASE[0])
        for number, row in enumerate(rows):
            where = f"{file.relative_to(folder)}, row {number}"
            query, name, part = row.get(query_column), row.get(database_column), split or row.get("split")
            for column, value in {database_column: name, "split": part}.items():
                if not isinstance(value or "", str):
                    raise DataError(f"{folder}: {where}: {column} is {shorten_repr(value)}, not text; repair the row.")
            if not isinstance(query, str) or not query.strip():
                raise DataError(
                    f"{folder}: {where}: {query_column} is {shorten_repr(query)}, not SQL; remove or repair the row."
                )
            database = databases.find(name, f"{folder}: {where}")
            task: dict[str, Any] = {
                **{name: value for name, value in row.items() if name not in used and isinstance(value, _PLAIN)},
                **{"db_id": database.db_id, "query": query, "db_path": database.path},
                "hardness": row.get("hardness") or hardness(query),
            }
            tasks.append(task | ({"split": SPLIT_NAMES.get(part, part)} if part else {}))
            places[task["id"]] = where
    check_unique_ids(tasks, folder)
    check_databases(sorted({task["db_path"] for task in tasks}))
    return tasks, places


def _find_files(folder: Path) -> list[tuple[Path, str | None]]:
    """The files with questions, each with the split that its name means."""
    named = [folder / name for name in _FILES if (folder / name).is_file()]
    candidates = named or sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if len(candidates) == 1:
        return [(candidates[0], None)]
    if candidates:
        raise DataError(f"{folder} has {' and '.join(file.name for file in candidates)}; keep one file of questions.")
    if any(folder.glob("*_tables.json")) and (folder / "examples").is_dir():
        files = sorted((folder / "examples").glob("*.json"))
        parts = [(file, split) for file in files for end, split in _PARTS.items() if file.stem.endswith(end)]
        if parts or files:
            return [*parts] or [(file, None) for file in files]
    raise DataError(
        f"{folder} has no questions: looked for {', '.join(_FILES)}, for another {', '.join(_SUFFIXES)} file, and for "
        "KaggleDBQA's examples/*.json with *_tables.json."
    )


def _query_column(file: Path, rows: Iterable[dict[str, Any]]) -> str:
    names = {name: None for row in rows for name in row}
    column = next((name for name in _QUERY if name in names), None)
    if column is None:
        raise DataError(
            f"{file} has no column with the gold SQL: looked for {', '.join(_QUERY)}; it has "
            f"{', '.join(map(str, names)) or 'no rows'}."
        )
    return column
