"""Finding and reading a domain's files, with one sentence for whatever is wrong with them."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from groundwire.domains._types import DataError

__all__ = ["choose_folder", "is_sqlite", "read_json", "read_rows", "some"]

_SQLITE_MAGIC = b"SQLite format 3\0"


def choose_folder(data_dir: str | None, *, bundled: Path, bundled_is: str, env: str = "") -> tuple[Path, str]:
    """The folder to read, absolute, and how it was chosen: ``data_dir``, else the variable ``env``, else ``bundled``.

    Raises :class:`DataError` where it is no folder.
    """
    if data_dir:
        folder, chosen = Path(data_dir), f"--data-dir {data_dir}"
    elif env and (from_env := os.environ.get(env)):
        folder, chosen = Path(from_env), f"{env} {from_env}"
    else:
        folder, chosen = bundled, f"bundled data ({bundled_is})"
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(
            f"{chosen}: {folder.resolve()} {what}; name a folder with data, or leave it out for the bundled data."
        )
    return folder.resolve(), chosen


def read_json(file: Path) -> Any:
    """What a JSON file holds. Raises :class:`DataError`."""
    try:
        return json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise DataError(f"{file}, line {error.lineno}: not valid JSON ({error.msg}); download it again.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}); download it again.") from error


def read_rows(file: Path) -> list[Any]:
    """The rows of a parquet, CSV (with a header), JSON-lines or JSON file. Raises :class:`DataError`."""
    if file.suffix == ".parquet":
        return _parquet(file)
    if file.suffix == ".json":
        rows = read_json(file)
        if not isinstance(rows, list):
            raise DataError(f"{file} holds a {type(rows).__name__}, not a list of tasks; is it the right file?")
        return rows
    try:
        text = file.read_text(encoding="utf-8-sig")  # spreadsheets begin a file with the mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}); save it as UTF-8 text.") from error
    if file.suffix == ".csv":
        try:
            return list(csv.DictReader(io.StringIO(text, newline="")))
        except csv.Error as error:
            raise DataError(f"{file} is not valid CSV ({error}); repair it.") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{file}, line {number}: not valid JSON ({error.msg}); repair the line.") from error
    return rows


def _parquet(file: Path) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as open_file:  # read_table() imports pandas, a quarter of a second
            return list(open_file.read(use_threads=False).to_pylist())
    except (pa.ArrowException, OSError) as error:
        cause = str(error).splitlines()[0]
        raise DataError(f"{file} is not a readable parquet file ({cause}); prepare or download it again.") from error


def is_sqlite(path: str | Path) -> bool:
    """Whether a file begins as SQLite files do. Raises :class:`DataError` where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); make it readable.") from error


def some(names: Iterable[str]) -> str:
    """The first three of ``names``."""
    names = sorted(names)
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
