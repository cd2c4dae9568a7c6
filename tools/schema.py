"""Schema text for prompts: one ``CREATE TABLE`` line for each table, in the same style for every database.

The databases' own DDL is not used: its quoting, case and layout vary, and a small policy would have to learn all of
them. Identifiers are unchanged, because queries must use them. Types are mapped to SQLite's few. Every bracket and
comma has a blank on both sides, so a word is always the same token.

A schema that is too long is cut after whole tables, and a warning names the missing ones: half a table looks like a
complete one, and missing tables cost several points of accuracy.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from groundwire.tools.errors import ShortenedWarning
from groundwire.tools.sql import QueryError, SqlError, connections, readable, run_query

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = (
    "add all alter and as autoincrement between case check collate commit constraint create cross current_date "
    "current_time current_timestamp default deferrable delete distinct drop else escape except exists foreign "
    "from full group having in index indexed inner insert intersect into is isnull join left limit natural not "
    "nothing notnull null on or order outer primary references returning right select set table then to "
    "transaction union unique update using values when where"
)
RESERVED = frozenset(_RESERVED.split())
"""The keywords, in lower case, that SQLite accepts as names only in quotes."""
# In the order of SQLite's own tests (https://www.sqlite.org/datatype3.html#determination_of_column_affinity). Types
# with numeric affinity are split by their usual content.
_TYPES = (
    (re.compile("int|bool|year|bit"), "int"),
    (re.compile("char|clob|text|date|time|string|enum"), "text"),
    (re.compile("blob|binary"), "blob"),
    (re.compile("real|floa|doub|num|dec|money"), "real"),
)
_EXAMPLE_ROWS = 1000
_EXAMPLE_CHARS = 30


@dataclass(frozen=True)
class TableInfo:
    """The schema text, and the names of the tables that did not fit."""

    text: str
    cut: list[str]


def table_info(
    database: str | Path, *, max_chars: int | None = None, example_values: int = 3, show_keys: bool = True
) -> TableInfo:
    """Describe the tables of the SQLite file ``database``.

    Each table is one line, ``CREATE TABLE t ( a int , b text )``. With ``show_keys`` its primary and foreign keys
    follow the columns. Up to ``example_values`` distinct values of each column follow on separate lines,
    ``-- b : 'x' , 'y'``. A table that would exceed ``max_chars`` is left out and named in ``cut`` and in a
    :class:`~groundwire.tools.errors.ShortenedWarning`. The result is cached until the file changes.

    Raises :class:`groundwire.tools.sql.DatabaseError`.
    """
    path = os.fspath(database)
    with readable(path):
        return _describe(path, connections.signature(path), max_chars, example_values, show_keys)


def describe_table(database: str | Path, table: str) -> str:
    """One table as in :func:`table_info`, or one view, without example values, which may be slow to compute.

    Raises :class:`groundwire.tools.sql.SqlError` for an unknown name, and :class:`groundwire.tools.sql.DatabaseError`.
    """
    path = os.fspath(database)
    with readable(path), contextlib.closing(connections.open_readonly(path)) as conn:
        kinds = dict(conn.execute("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')").fetchall())
        name = next((name for name in kinds if name.lower() == table.lower()), None)
        if name is None:
            known = [name for name in kinds if not name.startswith("sqlite_")]
            raise SqlError(f"no such table: {table}. Tables: {', '.join(known) or 'none'}")
        if kinds[name] == "table":
            return "\n".join(_table_lines(conn, path, name, 3, show_keys=True))
        try:
            (line,) = _table_lines(conn, path, name, 0, show_keys=False)
        except sqlite3.OperationalError as error:  # a view over a dropped table
            raise SqlError(f"the view {name} cannot be used: {error}") from error
        return line.replace("TABLE", "VIEW", 1)


@lru_cache(maxsize=1024)
def _describe(
    path: str, _signature: tuple[int, ...], max_chars: int | None, example_values: int, show_keys: bool
) -> TableInfo:
    lines, cut, used = list[str](), list[str](), 0
    with contextlib.closing(connections.open_readonly(path)) as conn:
        tables = conn.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        )
        for (table,) in tables.fetchall():
            text = "\n".join(_table_lines(conn, path, table, example_values, show_keys))
            if max_chars is not None and used + len(text) > max_chars:
                cut.append(table)
                continue
            lines.append(text)
            used += len(text) + 1
    if cut:
        warnings.warn(
            f"{path}: the schema text of {max_chars} characters leaves out {', '.join(cut)}: questions "
            "about these tables cannot be answered; raise the limit, or show fewer example values",
            ShortenedWarning,
            stacklevel=3,
        )
    return TableInfo("\n".join(lines), cut)


def _table_lines(
    conn: sqlite3.Connection, path: str, table: str, example_values: int, show_keys: bool
) -> Iterable[str]:
    columns = conn.execute(f"PRAGMA table_info({connections.quote_identifier(table)})").fetchall()
    parts = [f"{_quote_if_needed(name)} {_normalize_type(declared)}" for _, name, declared, *_ in columns]
    if show_keys:
        parts += _keys(conn, table, columns)
    yield f"CREATE TABLE {_quote_if_needed(table)} ( {' , '.join(parts)} )"
    if example_values > 0:
        for _, column, *_ in columns:
            if values := _examples(path, table, column, example_values):
                yield f"-- {_quote_if_needed(column)} : {' , '.join(values)}"


def _keys(conn: sqlite3.Connection, table: str, columns: list[Any]) -> Iterable[str]:
    if primary := _primary_key(columns):
        yield f"primary key ( {_name_list(primary)} )"
    foreign: dict[int, tuple[str, list[str], list[str]]] = {}
    listed = conn.execute(f"PRAGMA foreign_key_list({connections.quote_identifier(table)})")
    for number, _, parent, column, parent_column, *_ in listed:
        _, own, referenced = foreign.setdefault(number, (parent, [], []))
        own.append(column)
        if parent_column is not None:
            referenced.append(parent_column)
    # SQLite lists the keys in reverse order of declaration.
    for _, (parent, own, referenced) in sorted(foreign.items(), reverse=True):
        columns = conn.execute(f"PRAGMA table_info({connections.quote_identifier(parent)})").fetchall()
        referenced = referenced or _primary_key(columns)  # noqa: PLW2901
        target = f" ( {_name_list(referenced)} )" if referenced else ""
        yield f"foreign key ( {_name_list(own)} ) references {_quote_if_needed(parent)}{target}"


def _primary_key(columns: list[Any]) -> list[str]:
    return [name for position, name in sorted((pk, name) for _, name, _, _, _, pk in columns) if position]


def _examples(path: str, table: str, column: str, count: int) -> list[str]:
    column, table = connections.quote_identifier(column), connections.quote_identifier(table)
    try:
        rows = run_query(
            path,
            f"SELECT DISTINCT c FROM (SELECT {column} AS c FROM {table} LIMIT {_EXAMPLE_ROWS}) "  # noqa: S608 - names from the schema
            f"WHERE c IS NOT NULL LIMIT {count}",
            timeout_s=1.0,
        ).rows
    except QueryError:
        return []  # the table is shown without examples
    return [_literal(value) for (value,) in rows]


def _literal(value: Any) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()[:_EXAMPLE_CHARS]}'"
    if not isinstance(value, str):
        return str(value)
    text = " ".join(value.split())
    if len(text) > _EXAMPLE_CHARS:
        text = text[:_EXAMPLE_CHARS] + "..."
    return "'" + text.replace("'", "''") + "'"


def _normalize_type(declared: str) -> str:
    lowered = declared.lower()
    return next((name for pattern, name in _TYPES if pattern.search(lowered)), "text" if not lowered else "real")


def _quote_if_needed(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) and name.lower() not in RESERVED else connections.quote_identifier(name)


def _name_list(names: Iterable[str]) -> str:
    return " , ".join(map(_quote_if_needed, names))
