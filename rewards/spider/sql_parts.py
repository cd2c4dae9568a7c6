"""The tables, columns and clauses of a query, to measure how much two queries have in common.

Names are compared without case, tables and aliases of columns: ``T1.Name`` of ``singer AS T1`` is the column ``name``.
A text that sqlglot cannot parse has no parts.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from groundwire.tools.sql.syntax import parse_query

__all__ = ["Parts", "f1", "parts_of"]


@dataclass(frozen=True)
class Parts:
    """Sets of normalised texts."""

    tables: frozenset[str]
    columns: frozenset[str]
    clauses: frozenset[str]


def f1(gold: Set[str], predicted: Set[str]) -> float:
    """The F1 score of two sets, 0 to 1; two empty sets are equal."""
    if not gold and not predicted:
        return 1.0
    return 2 * len(gold & predicted) / (len(gold) + len(predicted))


@functools.lru_cache(maxsize=4096)
def parts_of(sql: str) -> Parts | None:
    """The parts of one query; None if the text is anything else, or too long."""
    try:
        tree = parse_query(sql)
        return None if tree is None else _query_parts(tree)
    except RecursionError:
        return None


def _query_parts(query: Any) -> Parts:
    from sqlglot import exp

    query = query.copy()
    defined = {cte.alias.lower() for cte in query.find_all(exp.CTE)}
    tables = {table.name.lower() for table in query.find_all(exp.Table)} - defined
    for column in query.find_all(exp.Column):
        column.set("table", None)
    columns = {column.name.lower() for column in query.find_all(exp.Column)}
    clauses: set[str] = set()
    for node in query.walk():
        clauses |= {f"{type(node).__name__.lower()}: {text}" for text in _clause_texts(node)}
    return Parts(frozenset(tables), frozenset(columns), frozenset(clauses))


def _clause_texts(node: Any) -> list[str]:
    """The parts of a clause as texts; each predicate of a WHERE separately, so that two of three count."""
    from sqlglot import exp

    def text(each: exp.Expression) -> str:
        return each.sql(dialect="sqlite", normalize=True, comments=False).lower()

    if isinstance(node, (exp.Where, exp.Having)):
        condition = node.this.unnest()
        return [text(each) for each in (condition.flatten() if isinstance(condition, exp.And) else [condition])]
    if isinstance(node, exp.Select):
        selected = [text(each.unalias()) for each in node.expressions]
        return [*selected, "distinct"] if node.args.get("distinct") else selected
    if isinstance(node, (exp.Group, exp.Order)):
        return [text(each) for each in node.expressions]
    if isinstance(node, (exp.Limit, exp.Offset)):
        return [text(node.expression)]
    if isinstance(node, exp.SetOperation):
        return ["distinct" if node.args.get("distinct") else "all"]
    return []
