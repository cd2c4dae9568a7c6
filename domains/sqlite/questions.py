"""Find and read the questions of a folder.

They are in one file, ``questions.jsonl``, ``.csv``, ``.parquet`` or ``.json``, or the only JSON-lines, CSV or parquet
file of the folder; or in the layout of KaggleDBQA (Lee et al., ACL 2021): ``examples/*.json`` beside a
``*_tables.json``, where the files ``*_fewshot`` are its questions for training and ``*_test`` those for validation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from groundwire.domains._databases import check_databases
from groundwire.domains._readers import check_unique_ids, read_tasks
from groundwire.domains._types import DataError
from groundwire.domains.spider.hardness import hardness
from groundwire.domains.sqlite.databases import Databases
from groundwire.domains.text_to_sql.splits import SPLIT_NAMES
from groundwire.tools.files import shorten_repr

__all__ = ["read_questions"]

_FILES = ("questions.jsonl", "questions.csv", "questions.parquet", "questions.json")
_SUFFIXES = (".jsonl", ".csv", ".parquet")
_QUERY = ("query", "sql", "SQL", "gold_sql", "gold")
_DATABASE = ("database", "db_path", "db_id", "db")
_PARTS = {"_fewshot": "train", "_test": "validation"}


def read_questions(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tasks of ``folder``, and the place of each task's row by its id, such as ``questions.csv, row 3``.

    A task has id, db_id, question, query, db_path (absolute), hardness, ``split`` if its row has one, and the row's
    other columns of text or numbers. Rows are counted from 0. Raises :class:`DataError`.
    """
    databases = Databases(folder)
    tasks, places = [], {}
    for file, split in _find_files(folder):
        rows = read_tasks(file, text_columns=("question",))
        query_column = _query_column(file, rows)
        database_column = next((name for name in _DATABASE if any(row.get(name) for row in rows)), None)
        for number, row in enumerate(rows):
            where = f"{file.relative_to(folder)}, row {number}"
            query = row.get(query_column)
            if not isinstance(query, str) or not query.strip():
                raise DataError(
                    f"{folder}: {where}: {query_column} is {shorten_repr(query)}, not SQL; remove or repair the row."
                )
            name = row.get(database_column) if database_column else None
            if not isinstance(name or "", str):
                raise DataError(
                    f"{folder}: {where}: {database_column} is {shorten_repr(name)}, not text; repair the row."
                )
            database = databases.find(name, f"{folder}: {where}")
            task = {
                **_other_columns(row),
                "db_id": database.db_id,
                "query": query,
                "db_path": database.path,
                "hardness": row.get("hardness") or hardness(query),
            }
            if split or row.get("split"):
                task["split"] = split or _split_name(row["split"], f"{folder}: {where}")
            tasks.append(task)
            places[task["id"]] = where
    check_unique_ids(tasks, folder)
    check_databases(sorted({task["db_path"] for task in tasks}))
    return tasks, places


def _find_files(folder: Path) -> list[tuple[Path, str | None]]:
    """The files with questions, each with the split that its name means."""
    named = [folder / name for name in _FILES if (folder / name).is_file()]
    found = named or sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if len(found) == 1:
        return [(found[0], None)]
    if found:
        raise DataError(f"{folder} has {' and '.join(file.name for file in found)}; keep one file of questions.")
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
    found = next((name for name in _QUERY if name in names), None)
    if found is None:
        raise DataError(
            f"{file} has no column with the gold SQL: looked for {', '.join(_QUERY)}; it has "
            f"{', '.join(map(str, names)) or 'no rows'}."
        )
    return found


def _other_columns(row: dict[str, Any]) -> dict[str, Any]:
    return dict(_plain_columns(row))


def _plain_columns(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All columns but those read here, and without parse trees and token lists."""
    for name, value in row.items():
        if name not in (*_QUERY, *_DATABASE, "split") and (value is None or isinstance(value, str | int | float)):
            yield name, value


def _split_name(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: split is {shorten_repr(value)}, not text; repair the row.")
    return SPLIT_NAMES.get(value, value)
