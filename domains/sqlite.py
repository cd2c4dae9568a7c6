"""``--domain sqlite --data-dir FOLDER``: questions about your own SQLite databases, answered with SQL.

The folder has SQLite files, anywhere below it, and questions. These are in one file, ``questions.jsonl``, ``.csv``,
``.parquet`` or ``.json``, or the only JSON-lines, CSV or parquet file of the folder; or in the layout of KaggleDBQA
(Lee et al., ACL 2021): ``examples/*.json`` beside a ``*_tables.json``, where the files ``*_fewshot`` are its questions
for training and ``*_test`` those for validation.

Every gold query is run when the data is read, unless :mod:`groundwire.domains.prepare` wrote the folder; tasks whose
gold cannot judge an answer are left out as for Spider, and each broken gold is named with its row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire.domains._readers import check_databases, check_unique_ids, first_names, read_tasks
from groundwire.domains._types import DataError, Task
from groundwire.domains.spider.hardness import LEVELS, hardness
from groundwire.domains.text_to_sql.domain import SPLIT_NAMES, Splits, SqlDomain, split_tasks
from groundwire.domains.text_to_sql.golds import Gold, GoldProblem, leave_out
from groundwire.tools.files import shorten_repr
from groundwire.tools.sql import SUFFIXES, has_suffix

_FILES = ("questions.jsonl", "questions.csv", "questions.parquet", "questions.json")
_SUFFIXES = (".jsonl", ".csv", ".parquet")
_QUERY = ("query", "sql", "SQL", "gold_sql", "gold")
_DATABASE = ("database", "db_path", "db_id", "db")
_PARTS = {"_fewshot": "train", "_test": "validation"}
_PLAIN = (str, int, float, type(None))  # of the columns that a task keeps: no parse trees and token lists


class SqliteDomain(SqlDomain):
    """Text-to-SQL on a folder of yours. A task has id, split, db_id, question, query, db_path, hardness, and others."""

    name = "sqlite"
    names_broken_golds = True
    breakdowns = {"hardness": {level: level for level in LEVELS}}

    def read(self, folder: Path, split: str = "") -> Splits:
        """The tasks of all questions."""
        tasks, places = _read_questions(folder)
        splits, split_by = split_tasks(tasks, str(folder))
        return Splits(splits, f", split by {split_by}", where=lambda task: places[task["id"]])

    def database_folders(self, data_dir: str | None = None) -> list[Path]:
        """The folder of the data, and its databases, which may be links."""
        folder, _ = self.folder(data_dir)
        return [folder, *(file for files in _databases_by_name(folder).values() for file in files)]

    def files(
        self, splits: Splits, problems: Mapping[Gold, GoldProblem]
    ) -> tuple[Mapping[str, list[Task]], dict[str, int]]:
        """One file, ``questions.parquet``, with the column ``split``."""
        others = [task for name, tasks in splits.tasks.items() if name != "train" for task in tasks]
        kept, judged, left_out = leave_out(splits.tasks["train"], others, problems)
        return {"questions": [*kept, *judged]}, left_out


domain = SqliteDomain()


def _read_questions(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tasks of ``folder``, and the place of each task's row by its id, such as ``questions.csv, row 3``.

    A task has id, db_id, question, query, db_path (absolute), hardness, ``split`` if its row has one, and the row's
    other columns of text or numbers. Rows are counted from 0. Raises :class:`DataError`.
    """
    databases, used = _databases_by_name(folder), (*_QUERY, *_DATABASE, "split")
    tasks, places = [], {}
    for file, split in _find_files(folder):
        rows = read_tasks(file, text_columns=("question",))
        columns = {name: None for row in rows for name in row}
        query_column = next((name for name in _QUERY if name in columns), None)
        if query_column is None:
            raise DataError(
                f"{file} has no column with the gold SQL: looked for {', '.join(_QUERY)}; it has "
                f"{', '.join(map(str, columns)) or 'no rows'}."
            )
        database_column = next((name for name in _DATABASE if any(row.get(name) for row in rows)), _DATABASE[0])
        for number, row in enumerate(rows):
            where = f"{file.relative_to(folder)}, row {number}"
            query, name, split_name = row.get(query_column), row.get(database_column), split or row.get("split")
            for column, value in {database_column: name, "split": split_name}.items():
                if not isinstance(value or "", str):
                    raise DataError(f"{folder}: {where}: {column} is {shorten_repr(value)}, not text; repair the row.")
            if not isinstance(query, str) or not query.strip():
                raise DataError(
                    f"{folder}: {where}: {query_column} is {shorten_repr(query)}, not SQL; remove or repair the row."
                )
            database = _find_database(databases, name, folder, where)
            unique = len(databases[database.stem]) == 1
            task: dict[str, Any] = {
                **{name: value for name, value in row.items() if name not in used and isinstance(value, _PLAIN)},
                "db_id": database.stem if unique else "-".join(database.relative_to(folder).parts),
                "query": query,
                "db_path": str(database.resolve()),
                "hardness": row.get("hardness") or hardness(query),
            }
            tasks.append(task | ({"split": SPLIT_NAMES.get(split_name, split_name)} if split_name else {}))
            places[task["id"]] = where
    check_unique_ids(tasks, folder)
    check_databases(sorted({task["db_path"] for task in tasks}))
    return tasks, places


def _databases_by_name(folder: Path) -> dict[str, list[Path]]:
    """The SQLite files below ``folder`` by what a row may call them: path in the folder, name, name without suffix."""
    files = sorted(path for path in folder.rglob("*") if has_suffix(path) and path.is_file())
    if not files:
        raise DataError(f"{folder} has no SQLite file ({', '.join(SUFFIXES)}); add the databases.")
    databases = defaultdict[str, list[Path]](list)
    for file in files:
        for name in {file.relative_to(folder).as_posix(), file.name, file.stem}:
            databases[name].append(file)
    return databases


def _find_database(databases: Mapping[str, list[Path]], name: str | None, folder: Path, where: str) -> Path:
    """The database that the row ``where`` names; without a name it is the only one."""
    matches = databases.get(name, []) if name else sorted({file for files in databases.values() for file in files})
    if len(matches) == 1:
        return matches[0]
    where = f"{folder}: {where}"
    if not name:
        raise DataError(f"{where} names no database, and there are {len(matches)}; add the column database.")
    if not matches:
        names = first_names({file.stem for files in databases.values() for file in files})
        raise DataError(f"{where}: the folder has no database {shorten_repr(name)}; it has {names}.")
    paths = " and ".join(file.relative_to(folder).as_posix() for file in matches)
    raise DataError(f"{where}: {len(matches)} databases are called {shorten_repr(name)} ({paths}); give its path.")


def _find_files(folder: Path) -> list[tuple[Path, str | None]]:
    """The files with questions, each with the split that its name means."""
    named = [folder / name for name in _FILES if (folder / name).is_file()]
    others = (path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and path.is_file())
    candidates = named or sorted(others)
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
