"""Whether the databases that a domain found can be used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from groundwire.domains._types import DataError
from groundwire.tools.schema import table_info
from groundwire.tools.sql import DatabaseError, is_sqlite

__all__ = ["SUFFIXES", "check_databases"]

SUFFIXES = (".sqlite", ".sqlite3", ".db")
"""Of the files that are taken for SQLite databases."""


def check_databases(databases: Iterable[str | Path]) -> None:
    """Raise :class:`DataError` for a file that is no SQLite database, or that has no tables to describe."""
    for path in databases:
        if not is_sqlite(path):
            raise DataError(f"{path} is no readable SQLite file; copy or download it again.")
        try:
            tables = table_info(path, example_values=0).text
        except DatabaseError as error:
            raise DataError(f"{error}; copy or download it again.") from error
        if not tables:
            raise DataError(f"{path} has no tables; is it the right file?")
