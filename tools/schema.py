"""Schema text for prompts: one ``CREATE TABLE`` line for each table, in the same style for every database.

The databases' own DDL is not used: its quoting, case and layout vary, and a small policy would have to learn all of
them. Identifiers are unchanged, because queries must use them. Types are mapped to SQLite's few. Every bracket and
comma has a blank on both sides, so a word is always the same token.

A schema that is too long is cut after whole tables, and a warning names the missing ones: half a table looks like a
complete one, and missing tables cost several points of accuracy. A table that cannot be read is named with the reason.
"""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from groundwire.tools import sql
from groundwire.tools.errors import ShortenedWarning, SkippedWarning
from groundwire.tools.sql import Catalog, QueryError, QueryTimeoutError, SqlError, TableDefinition
from groundwire.tools.text import first_of, printable, with_reasons

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
_EXAMPLES_S = 5.0


@dataclass(frozen=True)
class TableInfo:
    """The schema text, the names of the tables that did not fit, and why others and views cannot be used, by name."""

    text: str
    cut: list[str]
    skipped: Mapping[str, str] = field(default_factory=dict)


def table_info(
    database: str | Path, *, max_chars: int | None = None, example_values: int = 3, show_keys: bool = True
) -> TableInfo:
    """Describe the tables of the SQLite file ``database``.

    Each table is one line, ``CREATE TABLE t ( a int , b text )``. With ``show_keys`` its primary and foreign keys
    follow the columns. Up to ``example_values`` distinct values of each column follow on separate lines,
    ``-- b : 'x' , 'y'``. A table that would exceed ``max_chars`` is left out and named in ``cut`` and in a
    :class:`~groundwire.tools.errors.ShortenedWarning`. What cannot be read is named in the last line, in ``skipped``
    and in a :class:`~groundwire.tools.errors.SkippedWarning`. The result is cached until the file changes.

    Raises :class:`groundwire.tools.sql.DatabaseError`.
    """
    path = os.fspath(database)
    with sql.readable(path):
        return _describe(path, sql.signature(path), max_chars, example_values, show_keys)


def describe_table(database: str | Path, table: str) -> str:
    """One table as in :func:`table_info`, or one view, without example values, which may be slow to compute.

    Raises :class:`groundwire.tools.sql.SqlError` for an unknown name or a table that cannot be used, and
    :class:`groundwire.tools.sql.DatabaseError`.
    """
    catalog = sql.read_catalog(database)
    if (described := catalog.find(table)) is None:
        for name, reason in catalog.skipped.items():
            if name.lower() == table.lower():
                raise SqlError(f"{name} cannot be used: {reason}")
        raise SqlError(f"no such table: {table}. Tables: {', '.join(catalog.tables) or 'none'}")
    if described.kind == "view":
        return _table_line(described, catalog, show_keys=False).replace("TABLE", "VIEW", 1)
    examples, line = _Examples(os.fspath(database), 3), _table_line(described, catalog, show_keys=True)
    return "\n".join([line, *examples.lines(described), *examples.problems()])


@lru_cache(maxsize=1024)
def _describe(
    path: str, _signature: tuple[int, ...], max_chars: int | None, example_values: int, show_keys: bool
) -> TableInfo:
    lines, cut, left = list[str](), list[str](), math.inf if max_chars is None else max_chars
    catalog, examples = sql.read_catalog(path), _Examples(path, example_values)
    for table in catalog.tables.values():
        if table.kind == "view":
            continue
        text = _table_line(table, catalog, show_keys)
        if len(text) <= left:
            text = "\n".join([text, *examples.lines(table)])
        if len(text) > left:
            cut.append(table.name)
            continue
        lines.append(text)
        left -= len(text) + 1
    note = f"-- cannot be used: {with_reasons(catalog.skipped)}"
    if catalog.skipped and len(note) <= left:
        lines.append(note)
    if cut:
        warnings.warn(
            f"{path}: the schema text of {max_chars} characters leaves out {first_of(cut, 20)}: questions "
            "about these tables cannot be answered; raise the limit, or show fewer example values",
            ShortenedWarning,
            stacklevel=3,
        )
    if problems := [problem[3:] for problem in [*([note] if catalog.skipped else []), *examples.problems()]]:
        warnings.warn(f"{printable(path)}: {'; '.join(problems)}", SkippedWarning, stacklevel=3)
    return TableInfo("\n".join(lines), cut, catalog.skipped)


def _table_line(table: TableDefinition, catalog: Catalog, show_keys: bool) -> str:
    parts = [f"{_quote_if_needed(column.name)} {_normalize_type(column.type)}" for column in table.columns]
    if show_keys:
        if table.primary_key:
            parts.append(f"primary key ( {_name_list(table.primary_key)} )")
        for key in table.foreign_keys:
            parent = catalog.find(key.parent)
            referenced = key.parent_columns or (parent.primary_key if parent else ())
            target = f" ( {_name_list(referenced)} )" if referenced else ""
            own = _name_list(key.columns)
            parts.append(f"foreign key ( {own} ) references {_quote_if_needed(key.parent)}{target}")
    return f"CREATE TABLE {_quote_if_needed(table.name)} ( {' , '.join(parts)} )"


class _Examples:
    """The first ``count`` distinct values of columns, as long as reading them takes no longer than a query may."""

    def __init__(self, path: str, count: int) -> None:
        self._path, self._count = path, count
        self._end = time.perf_counter() + _EXAMPLES_S
        self._failed: dict[str, str] = {}

    def lines(self, table: TableDefinition) -> Iterator[str]:
        for column in table.names if self._count > 0 else ():
            if values := self._values(table.name, column):
                yield f"-- {_quote_if_needed(column)} : {' , '.join(values)}"

    def problems(self) -> list[str]:
        """Which columns are shown without values though they may have some, and why; empty if none is."""
        return [f"-- no example values: {with_reasons(self._failed)}"] if self._failed else []

    def _values(self, table: str, column: str) -> list[str]:
        own, source = sql.quote_identifier(column), sql.quote_identifier(table)
        left = self._end - time.perf_counter()
        try:
            if left <= 0:
                raise QueryTimeoutError(f"{_EXAMPLES_S:g} s were over")
            rows = sql.run_query(
                self._path,
                f"SELECT DISTINCT c FROM (SELECT {own} AS c FROM {source} LIMIT {_EXAMPLE_ROWS}) "  # noqa: S608 - names from the schema
                f"WHERE c IS NOT NULL LIMIT {self._count}",
                timeout_s=min(left, 1.0),
            ).rows
        except QueryError as error:
            self._failed[f"{table}.{column}"] = str(error).rpartition(" cannot be read: ")[2]
            return []
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
    return name if _PLAIN_NAME.fullmatch(name) and name.lower() not in RESERVED else sql.quote_identifier(name)


def _name_list(names: Iterable[str]) -> str:
    return " , ".join(map(_quote_if_needed, names))
