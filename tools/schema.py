"""Table info for prompts: one ``CREATE TABLE`` line a table, written the same way for every database.

The databases' own DDL is not used: it differs in quoting, case and layout from one to the next, and a small policy
spends its capacity on that. Identifiers stay as they are, for the query must use them; types become the few that SQLite
tells apart; and every bracket and comma has a blank on both sides, so that a word is a word wherever it stands.

Where a schema must be cut it is cut on whole tables, and a warning names them: half a table reads like a whole one, and
a schema cut too short costs several points of accuracy that nobody notices.
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

from groundwire.tools import _readonly_sqlite
from groundwire.tools.sql import DatabaseError, QueryError, SqlError, run_query

__all__ = ["RESERVED", "TableInfo", "describe_table", "table_info"]

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED = frozenset(
    [
        *("add", "all", "alter", "and", "as", "autoincrement", "between", "case", "check", "collate", "commit"),
        *("constraint", "create", "cross", "current_date", "current_time", "current_timestamp", "default"),
        *("deferrable", "delete", "distinct", "drop", "else", "escape", "except", "exists", "foreign", "from", "full"),
        *("group", "having", "in", "index", "indexed", "inner", "insert", "intersect", "into", "is", "isnull", "join"),
        *("left", "limit", "natural", "not", "nothing", "notnull", "null", "on", "or", "order", "outer", "primary"),
        *("references", "returning", "right", "select", "set", "table", "then", "to", "transaction", "union", "unique"),
        *("update", "using", "values", "when", "where"),
    ]
)
"""The keywords that SQLite does not take for a name without quotes, in lower case."""
# SQLite's own order of tests (https://www.sqlite.org/datatype3.html#determination_of_column_affinity), with the types
# that it only knows as "numeric" told apart by what people store in them.
_TYPES = (
    (re.compile("int|bool|year|bit"), "int"),
    (re.compile("char|clob|text|date|time|string|enum"), "text"),
    (re.compile("blob|binary"), "blob"),
    (re.compile("real|floa|doub|num|dec|money"), "real"),
)
_SAMPLED_ROWS = 1000
_SAMPLE_CHARS = 30


@dataclass(frozen=True)
class TableInfo:
    """The text for a prompt, and the names of the tables that did not fit into it."""

    text: str
    cut: list[str]


def table_info(
    database: str | Path, *, max_chars: int | None = None, example_values: int = 3, show_keys: bool = True
) -> TableInfo:
    """Describe the tables of the SQLite file ``database``.

    One line a table, ``CREATE TABLE t ( a int , b text )``; with ``show_keys`` its primary and foreign keys follow the
    columns; with ``example_values`` up to that many distinct values of each column follow on lines of their own,
    ``-- b : 'x' , 'y'``. A table that would pass ``max_chars`` is left out, named in ``cut`` and in a warning.
    Cached while the file stays the same. Raises :class:`groundwire.tools.sql.DatabaseError`.
    """
    path = os.fspath(database)
    try:
        return _described(path, _readonly_sqlite.signature(path), max_chars, example_values, show_keys)
    except (OSError, sqlite3.Error) as error:
        raise DatabaseError(_readonly_sqlite.broken(path, error)) from error


def describe_table(database: str | Path, table: str, *, example_values: int = 3) -> str:
    """One table as :func:`table_info` writes it, or one view, without sample values for they may be slow to compute.

    Raises :class:`groundwire.tools.sql.SqlError` when there is none of that name, and
    :class:`groundwire.tools.sql.DatabaseError`.
    """
    path = os.fspath(database)
    try:
        with contextlib.closing(_readonly_sqlite.open_readonly(path)) as conn:
            kinds = dict(
                conn.execute("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
            )
            name = next((name for name in kinds if name.lower() == table.lower()), None)
            if name is None:
                known = [name for name in kinds if not name.startswith("sqlite_")]
                raise SqlError(f"no such table: {table}. Tables: {', '.join(known) or 'none'}")
            if kinds[name] == "table":
                return "\n".join(_table(conn, path, name, example_values, show_keys=True))
            try:
                (line,) = _table(conn, path, name, 0, show_keys=False)
            except sqlite3.OperationalError as error:  # a view over what is no longer there
                raise SqlError(f"the view {name} cannot be used: {error}") from error
            return line.replace("TABLE", "VIEW", 1)
    except (OSError, sqlite3.Error) as error:
        raise DatabaseError(_readonly_sqlite.broken(path, error)) from error


@lru_cache(maxsize=1024)
def _described(
    path: str, _signature: tuple[int, ...], max_chars: int | None, example_values: int, show_keys: bool
) -> TableInfo:
    lines: list[str] = []
    cut: list[str] = []
    used = 0
    with contextlib.closing(_readonly_sqlite.open_readonly(path)) as conn:
        tables = conn.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        )
        for (table,) in tables.fetchall():
            text = "\n".join(_table(conn, path, table, example_values, show_keys))
            if max_chars is not None and used + len(text) > max_chars:
                cut.append(table)
                continue
            lines.append(text)
            used += len(text) + 1
    if cut:
        warnings.warn(
            f"{path}: table info cut at {max_chars} characters leaves out {', '.join(cut)}: "
            "questions about them cannot be answered; raise the limit, or ask for fewer sample values",
            stacklevel=3,
        )
    return TableInfo("\n".join(lines), cut)


def _table(conn: sqlite3.Connection, path: str, table: str, example_values: int, show_keys: bool) -> Iterable[str]:
    columns = conn.execute(f"PRAGMA table_info({_readonly_sqlite.quoted(table)})").fetchall()
    parts = [f"{_name(name)} {_type(declared)}" for _, name, declared, *_ in columns]
    if show_keys:
        parts += _keys(conn, table, columns)
    yield f"CREATE TABLE {_name(table)} ( {' , '.join(parts)} )"
    if example_values > 0:
        for _, column, *_ in columns:
            values = _samples(path, table, column, example_values)
            if values:
                yield f"-- {_name(column)} : {' , '.join(values)}"


def _keys(conn: sqlite3.Connection, table: str, columns: list[Any]) -> Iterable[str]:
    primary = _primary_key(columns)
    if primary:
        yield f"primary key ( {_names(primary)} )"
    foreign: dict[int, tuple[str, list[str], list[str]]] = {}
    for number, _, parent, column, parent_column, *_ in conn.execute(
        f"PRAGMA foreign_key_list({_readonly_sqlite.quoted(table)})"
    ):
        _, ours, theirs = foreign.setdefault(number, (parent, [], []))
        ours.append(column)
        if parent_column is not None:
            theirs.append(parent_column)
    # SQLite lists the last one declared first.
    for _, (parent, ours, theirs) in sorted(foreign.items(), reverse=True):
        columns = conn.execute(f"PRAGMA table_info({_readonly_sqlite.quoted(parent)})").fetchall()
        theirs = theirs or _primary_key(columns)  # noqa: PLW2901
        yield f"foreign key ( {_names(ours)} ) references {_name(parent)}" + (
            f" ( {_names(theirs)} )" if theirs else ""
        )


def _primary_key(columns: list[Any]) -> list[str]:
    return [name for position, name in sorted((pk, name) for _, name, _, _, _, pk in columns) if position]


def _samples(path: str, table: str, column: str, count: int) -> list[str]:
    column, table = _readonly_sqlite.quoted(column), _readonly_sqlite.quoted(table)
    try:
        rows = run_query(
            path,
            f"SELECT DISTINCT c FROM (SELECT {column} AS c FROM {table} LIMIT {_SAMPLED_ROWS}) "  # noqa: S608 - names out of the schema
            f"WHERE c IS NOT NULL LIMIT {count}",
            timeout_s=1.0,
        ).rows
    except QueryError:
        return []  # a table without samples is still worth showing
    return [_literal(value) for (value,) in rows]


def _literal(value: Any) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()[:_SAMPLE_CHARS]}'"
    if not isinstance(value, str):
        return str(value)
    text = " ".join(value.split())
    if len(text) > _SAMPLE_CHARS:
        text = text[:_SAMPLE_CHARS] + "..."
    return "'" + text.replace("'", "''") + "'"


def _type(declared: str) -> str:
    lowered = declared.lower()
    return next((name for pattern, name in _TYPES if pattern.search(lowered)), "text" if not lowered else "real")


def _name(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) and name.lower() not in RESERVED else _readonly_sqlite.quoted(name)


def _names(names: Iterable[str]) -> str:
    return " , ".join(map(_name, names))
