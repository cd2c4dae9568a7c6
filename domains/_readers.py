"""Find and read a domain's files. Every error is a :class:`DataError` that names the file and the remedy."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groundwire.domains._types import DataError
from groundwire.tools import files
from groundwire.tools.files import shorten_repr
from groundwire.tools.sql import DatabaseError, file_problem, read_catalog
from groundwire.tools.text import is_damaged, printable, with_reasons

_SUFFIXES = (".parquet", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt", "")
_USUAL = ("prompt", "messages", "input", "instruction", "query", "problem", "text", "task", "conversations")
"""Columns that have the question in the data of others."""
_TRACED = {"resourceSpans", "resourceLogs", "scopeSpans", "spanId", "span_id", "context.span_id", "traceId", "trace_id",
           "observations", "run_type", "steps", "sessionId", "payload", "log"}  # fmt: skip
"""Names in what agents have done, as tracers export it."""
_MAX_TEXT = 1 << 30  # size of the largest CSV or JSON-lines file that is read, in bytes


def data_folder(
    data_dir: str | None,
    option: str = "--data-dir",
    *,
    domain: str,
    content: str,
    bundled: Path | None = None,
    bundled_is: str = "generated",
    env: Sequence[str] = (),
) -> tuple[Path, str]:
    """The folder with the data, absolute, and its origin: ``data_dir``, a variable of ``env`` or ``bundled``.

    ``content`` says what it holds.
    """
    named = {name: value for name in env if (value := os.environ.get(name))}
    if data_dir:
        folder, origin = Path(data_dir), f"{option} {data_dir}"
    elif len({Path(value).resolve() for value in named.values()}) > 1:
        both = " and ".join(f"{name}={value}" for name, value in named.items())
        raise DataError(f"{both} name different folders: unset one of them, or give --data-dir.")
    elif named:
        name, value = next(iter(named.items()))
        folder, origin = Path(value), f"{name} {value}"
    elif bundled:
        folder, origin = bundled, f"bundled data ({bundled_is})"
    else:
        raise DataError(f"--domain {domain} has no data of its own: give --data-dir, {content}.")
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{origin} {problem}; name {content}{', or none for the bundled data' if bundled else ''}.")
    return folder.resolve(), origin


def read_json(file: Path) -> Any:
    """The content of a JSON file."""
    try:
        return files.read_json(file, unique=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not valid JSON: {error}"
        raise DataError(f"{file} cannot be read ({reason}); download it again, or save it as parquet.") from error


def read_tasks(
    file: Path, *, text_columns: Iterable[str], optional_columns: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """The rows of a parquet, CSV or TSV (with a header), JSON-lines or JSON file, by its suffix.

    Each has text in all ``text_columns``, text or nothing in ``optional_columns``, and an ``id``; a missing one
    is made of the file's name.
    """
    return check_rows(
        _read_rows(file), source=file, name=file.stem, text_columns=text_columns, optional_columns=optional_columns
    )


def check_rows(
    rows: Iterable[Any],
    *,
    source: Path | str,
    text_columns: Iterable[str],
    optional_columns: Iterable[str] = (),
    name: str = "task",
) -> list[dict[str, Any]]:
    """``rows`` as tasks, as :func:`read_tasks` returns them; a missing id begins with ``name``."""
    tasks = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{source}, row {number}: a {type(row).__name__}, not a task; remove or repair it.")
        for key in text_columns:
            if key not in row:
                raise DataError(f"{source}, row {number}: {_no_column(key, row)}")
            if not isinstance(value := row[key], str) or not value.strip():
                problem = "is empty" if value in (None, "") else f"is {shorten_repr(value)}, not text"
                raise DataError(f"{source}, row {number}: {key} {problem}; remove or repair the row.")
        for key in optional_columns:
            if not isinstance(row.get(key) or "", str):
                raise DataError(
                    f"{source}, row {number}: {key} is {shorten_repr(row[key])}, not text; remove or repair it."
                )
        own_id = row.get("id")
        tasks.append({**row, "id": f"{name}-{number}" if own_id in (None, "") else str(own_id)})
    return tasks


def _no_column(key: str, row: Mapping[str, Any]) -> str:
    """What is there in place of a column that is missing, and what to do."""
    plain = {str(name).strip("\ufeff _").lower(): name for name in row}
    names = (key, *(_USUAL if key == "question" else ()))
    remedy = f"Give each row one, or rename the column that has its {key}"
    if (other := next((plain[name] for name in names if name in plain), None)) is not None:
        is_text = isinstance(row[other], str)
        remedy = (
            f"Rename {other!r} to {key!r}" if is_text else f"Add one, with the text in {other!r} that the agent gets"
        )
    columns = f"its columns are {', '.join(map(str, row))}" if row else "it is empty"
    return f"there is no column {key!r}; {columns}. {remedy}.{_of_traces(row) if key == 'question' else ''}"


def _of_traces(value: Any) -> str:
    """What to do with a file that may have traces in place of tasks."""
    named = isinstance(value, Mapping) and not _TRACED.isdisjoint(value)
    named = named or (isinstance(value, Mapping) and isinstance(value.get("messages"), list))
    return " If these are traces of an agent: groundwire traces FILE --write DIR makes tasks of them." if named else ""


def _read_rows(file: Path) -> list[Any]:
    suffix = file.suffix.lower()
    if suffix not in _SUFFIXES:
        raise DataError(
            f"{file}: a file of the kind {suffix!r} cannot be read; decompress it, or save it as .jsonl, .json, .csv, "
            ".tsv or .parquet."
        )
    if suffix == ".parquet":
        return _read_parquet(file)
    if suffix == ".json":
        rows = read_json(file)
        if not isinstance(rows, list):
            names = f" with {first_names(rows)}" if isinstance(rows, dict) and rows else ""
            raise DataError(
                f"{file} holds a {type(rows).__name__}{names}, not a list of tasks; is it the right file? A list needs "
                f"a file of its own.{_of_traces(rows)}"
            )
        return rows
    try:
        text = files.read_bytes(file, max_bytes=_MAX_TEXT).decode("utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}); save it as UTF-8 text.") from error
    delimiter = {".csv": ",", ".tsv": "\t"}.get(suffix)
    return _parse_json_lines(file, text) if delimiter is None else _parse_csv(file, text, delimiter)


def _parse_csv(file: Path, text: str, delimiter: str) -> list[Any]:
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        check_columns(reader.fieldnames or (), file)
        rows = list(reader)
    except csv.Error as error:
        raise DataError(f"{file} is not valid CSV ({error}); repair it.") from error
    surplus = next((number for number, row in enumerate(rows) if None in row), None)  # the key of surplus values
    if surplus is not None:
        raise DataError(f"{file}, row {surplus}: it does not fit the columns; remove or repair it.")
    return rows


def check_columns(names: Iterable[str], source: Path | str) -> None:
    """Raise :class:`DataError` if two columns have the same name, of which a row would keep one."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{source} has several columns {shorten_repr(repeated[0])}; rename them.")


def _parse_json_lines(file: Path, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [files.parse_json(line, unique=True)] if line.strip() else []
        except ValueError as error:
            raise DataError(f"{file}, line {number}: not valid JSON ({error}); repair the line.") from error
    return rows


def _read_parquet(file: Path) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if not file.is_file():
            raise OSError("it is not a file")
        with pq.ParquetFile(file) as open_file:  # read_table() imports pandas, which takes a quarter of a second
            check_columns(open_file.schema_arrow.names, file)
            return list(open_file.read(use_threads=False).to_pylist())
    except (pa.ArrowException, OSError, ValueError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file} is not a readable parquet file ({cause}); prepare or download it again.") from error


def check_unique_ids(tasks: Iterable[Mapping[str, Any]], source: Path | str) -> None:
    """Raise :class:`DataError` if two tasks of ``source`` have the same id."""
    repeated = [name for name, count in Counter(task["id"] for task in tasks).items() if count > 1]
    if repeated:
        raise DataError(
            f"{source}: {len(repeated)} ids stand for more than one task, {repeated[0]!r} among them; make them unique."
        )


def first_names(names: Iterable[str]) -> str:
    """The first three of ``names``, for an error message."""
    names = sorted(names)
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def database_problem(path: str | Path) -> str:
    """Why a task cannot have the database ``path``; empty if it can."""
    unnamed = "its path is no Unicode text, so no task can name it" if is_damaged(str(path)) else ""
    return file_problem(path) or unnamed


def check_databases(databases: Iterable[str | Path]) -> None:
    """Raise :class:`DataError` for a file that is no SQLite database, or that has no tables to describe."""
    for path in databases:
        if problem := database_problem(path):
            raise DataError(f"{printable(str(path))} is no readable SQLite file: {problem}; copy or download it again.")
        try:
            catalog = read_catalog(path)
        except DatabaseError as error:
            raise DataError(f"{error}; copy or download it again.") from error
        if all(table.kind == "view" for table in catalog.tables.values()):
            skipped = f" that can be used: {with_reasons(catalog.skipped)}" if catalog.skipped else ""
            raise DataError(f"{printable(str(path))} has no tables{skipped}; is it the right file?")
