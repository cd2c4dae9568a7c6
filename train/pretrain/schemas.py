"""Schemas as the agents show them, taken apart."""

from __future__ import annotations

import re

from groundwire.tools.schema import table_info

__all__ = ["create_table", "schema_of", "tables_of"]

_MAX_CHARS = 4000
_TABLE = re.compile(r"CREATE TABLE (\w+) \( ([^\"]*) \)")


def schema_of(path: str) -> str:
    """The schema of a SQLite file: names and types alone."""
    return table_info(path, max_chars=_MAX_CHARS, example_values=0, show_keys=False).text


def tables_of(schema: str) -> dict[str, list[str]]:
    """The columns, with their types, of each table; those with names that need quotes are left out."""
    found = (_TABLE.fullmatch(line) for line in schema.split("\n"))
    return {match[1]: match[2].split(" , ") for match in found if match}


def create_table(name: str, columns: list[str]) -> str:
    """The table's line in a schema."""
    return f"CREATE TABLE {name} ( {' , '.join(columns)} )"
