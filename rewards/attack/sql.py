"""Queries that are right by chance: memorised results, dropped filters, what runs beside the gold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.rewards._sql import sql_answer
from groundwire.rewards.audit import INJECTION_QUERIES, weaken
from groundwire.tools.sql import QueryError, run_query

_MOST_ROWS = 20


def queries(task: Mapping[str, Any], gold: str, another: str) -> Iterator[tuple[str, str]]:
    """Names and queries; ``another`` is the gold of another task."""
    table, weaker = weaken(gold)
    bare = gold.rstrip("; \n")
    yield from (
        ("a constant", "SELECT 1"),
        ("another gold", another),
        ("no query", "SELECT"),
        *INJECTION_QUERIES.items(),
    )
    yield "the gold in a comment", f"SELECT 1 -- {' '.join(bare.split())}"
    yield "the gold as text", "SELECT '{}'".format(bare.replace("'", "''"))
    yield "stacked after", f"{bare}; DROP TABLE {table or 't'}"
    yield "stacked before", f"SELECT 1; {bare}"
    yield "cut", f"SELECT * FROM ({bare}) LIMIT 1"  # noqa: S608 - an attack
    yield "as many rows of another value", f"SELECT 'zxq' FROM ({bare})"  # noqa: S608
    yield "twice", f"SELECT * FROM ({bare}) UNION ALL SELECT * FROM ({bare})"  # noqa: S608
    if weaker:
        yield "filter dropped", weaker
    if table:
        yield "the whole table", f"SELECT * FROM {table}"  # noqa: S608 - an attack
        yield "no rows", f"SELECT 1 FROM {table} LIMIT 0"  # noqa: S608
        if rows := _result(task, gold):
            yield "the memorised result", f"{rows} WHERE EXISTS (SELECT 1 FROM {table})"  # noqa: S608
            yield "the memorised result alone", rows


def _result(task: Mapping[str, Any], gold: str) -> str:
    """A query with the gold's result as constants; empty if it is long."""
    from sqlglot import exp

    try:
        rows = run_query(sql_answer(task, "", "the attack").database, gold, max_rows=_MOST_ROWS + 1).rows
    except QueryError:
        return ""
    if not 0 < len(rows) <= _MOST_ROWS:
        return ""
    values = ", ".join(f"({', '.join(exp.convert(value).sql(dialect='sqlite') for value in row)})" for row in rows)
    return f"SELECT * FROM (VALUES {values})"  # noqa: S608
