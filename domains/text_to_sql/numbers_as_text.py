"""Golds that compare numbers which are stored as text: SQLite puts '9' after '10' then.

A gold orders, takes MAX or MIN of, or compares (<, >, BETWEEN) a column of such texts, and has another result if the
column is cast to a number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from groundwire.tools.sql import QueryError, connections, run_query

__all__ = ["compares_numbers_as_text"]

_NUMBER = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*")
_SHARE = 0.8
"""Of a column's texts, those that must read as numbers: others may be words for a missing value."""
_SAMPLE, _MAX_ROWS = 2000, 5000


def compares_numbers_as_text(database: str, tree: Any) -> bool:
    """Whether a CAST to a number changes the result of the gold query with the syntax ``tree``."""
    changed = tree.copy()
    tables = _tables(changed)
    if not any([_cast(database, tables, node) for node in _compared(changed)]):
        return False
    try:
        before, after = (
            _result(database, each.sql(dialect="sqlite"), ordered=bool(tree.args.get("order")))
            for each in (tree, changed)
        )
    except QueryError:
        return False
    return before != after


def _compared(tree: Any) -> list[list[Any]]:
    """The parts of each comparison, of each sort key, and of each MAX and MIN."""
    from sqlglot import exp

    found: list[list[Any]] = []
    for node in tree.find_all(exp.Max, exp.Min, exp.Ordered, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between):
        parts = (node.this, *(node.args.get(name) for name in ("expression", "low", "high")))
        found.append([part for part in parts if part is not None])
    return found


def _cast(database: str, tables: Sequence[tuple[str, str]], parts: list[Any]) -> bool:
    """Cast the columns of such texts among ``parts``, and the texts that they are compared with."""
    from sqlglot import exp

    columns = [part for part in parts if isinstance(part, exp.Column) and _reads_as_numbers(database, tables, part)]
    texts = [part for part in parts if isinstance(part, exp.Literal) and part.is_string]
    for part in (*columns, *texts) if columns else ():
        part.replace(exp.Cast(this=part.copy(), to=exp.DataType.build("REAL")))
    return bool(columns)


def _tables(tree: Any) -> list[tuple[str, str]]:
    """The names under which the query uses its tables, each with the table's own name in quotes."""
    from sqlglot import exp

    found = tree.find_all(exp.Table)
    return [(each.alias_or_name.lower(), each.this.sql(dialect="sqlite", identify=True)) for each in found]


def _reads_as_numbers(database: str, tables: Sequence[tuple[str, str]], column: Any) -> bool:
    owners = {table for alias, table in tables if column.table.lower() in ("", alias)}
    return any(_are_numbers(database, table, column.name) for table in owners)


@lru_cache(maxsize=4096)
def _are_numbers(database: str, table: str, column: str) -> bool:
    """Whether the texts of a column read as numbers; no if the table does not have the column."""
    name = connections.quote_identifier(column)
    try:
        columns = run_query(database, f"SELECT * FROM {table} LIMIT 0").columns  # noqa: S608 - quoted
        if column.lower() not in map(str.lower, columns):
            return False  # SQLite would take the name for a text
        sql = f"SELECT {name} FROM {table} WHERE typeof({name}) = 'text' LIMIT {_SAMPLE}"  # noqa: S608
        texts = [row[0] for row in run_query(database, sql).rows]
    except QueryError:
        return False
    return bool(texts) and sum(_NUMBER.fullmatch(text) is not None for text in texts) >= _SHARE * len(texts)


def _result(database: str, sql: str, *, ordered: bool) -> Any:
    rows = [tuple(map(_as_number, row)) for row in run_query(database, sql, max_rows=_MAX_ROWS).rows]
    return rows if ordered else Counter(rows)


def _as_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
