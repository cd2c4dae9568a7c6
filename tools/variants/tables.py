"""The tables of a database with a sample of their rows: all that its variants are made of.

At most a few hundred rows of a table are read, so a database of any size takes the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from groundwire.tools.sql import DatabaseError, QueryError, TableDefinition, quote_identifier, read_catalog, run_query

_SAMPLE_ROWS = 200
_SAMPLE_BYTES = 1_000_000
_MAX_TABLES = 200


@dataclass(frozen=True)
class Column:
    """``unique``: no value occurs twice, by declaration or in the sample. ``link``: table and column of the values."""

    name: str
    type: str
    unique: bool
    null_share: float
    values: tuple[Any, ...]
    link: tuple[str, str] | None = None


@dataclass(frozen=True)
class Table:
    """``rows`` are the sampled ones, with the values of ``columns`` in their order."""

    name: str
    ddl: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Schema:
    """Tables so that each follows those that it is linked to, and the statements that make the views."""

    tables: tuple[Table, ...]
    views: tuple[str, ...] = ()

    def columns_by_table(self) -> dict[str, list[str]]:
        """The names of the columns of each table, in lower case."""
        return {table.name.lower(): [column.name.lower() for column in table.columns] for table in self.tables}


def read_schema(database: str, pairs: Sequence[tuple[str, str]] = ()) -> Schema:
    """The schema of the SQLite file ``database`` with sampled rows.

    ``pairs`` are names of columns that queries compare with each other: links that no foreign key declares. Raises
    :class:`groundwire.tools.sql.DatabaseError`, also for a database with virtual tables, which cannot be made again.
    """
    catalog = read_catalog(database)
    tables = [_read_table(database, table) for table in catalog.tables.values() if table.kind != "view"]
    if len(tables) > _MAX_TABLES:
        raise DatabaseError(f"{database} has {len(tables)} tables; variants are made of {_MAX_TABLES} at most")
    views = tuple(table.sql for table in catalog.tables.values() if table.kind == "view")
    return Schema(_sorted_by_links(_with_observed_links(tables, pairs)), views)


def _read_table(database: str, table: TableDefinition) -> Table:
    if table.kind == "virtual table":
        raise DatabaseError(f"{database} has the virtual table {table.name}; databases with one have no variants")
    described = [column for column in table.columns if not column.generated]
    names, key = [column.name for column in described], tuple(table.primary_key)
    links = {
        child.lower(): (link.parent.lower(), (to or "").lower())
        for link in reversed(table.foreign_keys)
        for child, to in zip_longest(link.columns, link.parent_columns)
    }
    selected = ", ".join(map(quote_identifier, names))
    try:
        query = f"SELECT {selected} FROM {quote_identifier(table.name)}"  # noqa: S608 - quoted names
        rows = run_query(database, query, max_rows=_SAMPLE_ROWS, max_bytes=_SAMPLE_BYTES).rows
    except QueryError:
        rows = []
    columns = []
    for index, column in enumerate(described):
        values = [row[index] for row in rows if row[index] is not None]
        unique = key == (column.name,) or (len(values) > 1 and len(set(values)) == len(values))
        null_share = 1 - len(values) / len(rows) if rows else 0.0
        link = links.get(column.name.lower())
        columns.append(Column(column.name, column.type.upper(), unique, null_share, tuple(dict.fromkeys(values)), link))
    return Table(name=table.name, ddl=table.sql, columns=tuple(columns), key=key, rows=tuple(rows))


def _with_observed_links(tables: list[Table], pairs: Sequence[tuple[str, str]]) -> list[Table]:
    """The tables with full links: the key of a parent that is not named, and pairs whose values are a subset."""
    by_name = {table.name.lower(): table for table in tables}
    wanted = set(pairs) | {(b, a) for a, b in pairs}

    def linked(table: Table, column: Column) -> Column:
        link = _declared_link(column, by_name)
        return replace(column, link=link or (_observed_link(table, column, tables, wanted) if column.values else None))

    return [replace(table, columns=tuple(linked(table, column) for column in table.columns)) for table in tables]


def _declared_link(column: Column, tables: Mapping[str, Table]) -> tuple[str, str] | None:
    if column.link is None or (parent := tables.get(column.link[0])) is None:
        return None
    target = column.link[1] or (parent.key[0].lower() if parent.key else "")
    return (column.link[0], target) if target in {other.name.lower() for other in parent.columns} else None


def _observed_link(
    table: Table, column: Column, tables: Sequence[Table], wanted: set[tuple[str, str]]
) -> tuple[str, str] | None:
    for parent in tables:
        if parent is table or (column.unique and table.name <= parent.name):
            continue
        for other in parent.columns:
            if other.unique and (column.name.lower(), other.name.lower()) in wanted:
                return parent.name.lower(), other.name.lower()
    return None


def _sorted_by_links(tables: Sequence[Table]) -> tuple[Table, ...]:
    """Parents first; in a cycle the order of the file."""
    left, result = list(tables), dict[str, Table]()
    while left:
        roots = [t for t in left if all(c.link is None or c.link[0] in {*result, t.name.lower()} for c in t.columns)]
        table = (roots or left)[0]
        left.remove(table)
        result[table.name.lower()] = table
    return tuple(result.values())
