"""Golds that are probably wrong, the most suspicious first.

The reasons need no model: a result without rows or without information, an ORDER BY whose ties decide what LIMIT keeps,
and a text in double quotes that is the name of a column, which SQLite then reads instead of the text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from groundwire.domains._types import Task
from groundwire.domains.text_to_sql.golds import Gold, GoldProblem, gold_of
from groundwire.tools.neighbours.mutations import parse
from groundwire.tools.neighbours.ties import depends_on_ties, tie_probes
from groundwire.tools.sql import QueryError, run_query

__all__ = ["COLUMN", "CONSTANT", "NO_TABLE", "TIES", "suspects"]

TIES = "ties decide its result"
CONSTANT = "its result is only NULL or 0"
NO_TABLE = "it reads no table"
COLUMN = "a text in double quotes is a column"
_TRUST = {TIES: 0.5, CONSTANT: 0.4, NO_TABLE: 0.1, COLUMN: 0.3}
_TRUST_WITH_PROBLEM = 0.2
_TIMEOUT_S = 5.0


def suspects(tasks: Iterable[Task], problems: Mapping[Gold, GoldProblem]) -> list[dict[str, Any]]:
    """One row for each task with a suspicious gold: id, db_id, question, query, reasons and ``trust``, 0 to 1.

    ``problems`` are those that :func:`groundwire.domains.text_to_sql.golds.check_golds` found. Lowest trust first.
    """
    reasons: dict[Gold, list[str]] = {}
    rows = []
    for task in tasks:
        gold = gold_of(task)
        if gold not in reasons:
            reasons[gold] = [] if gold in problems else _reasons(*gold)
        trust = [_TRUST[reason] for reason in reasons[gold]]
        listed = list(reasons[gold])
        if gold in problems:
            trust.append(_TRUST_WITH_PROBLEM)
            listed.append(problems[gold].reason)
        if listed:
            columns = {name: task[name] for name in ("id", "db_id", "question", "query")}
            rows.append({**columns, "reasons": listed, "trust": min(trust)})
    return sorted(rows, key=lambda row: float(row["trust"]))


def _reasons(database: str, query: str) -> list[str]:
    from sqlglot import exp

    found = []
    if depends_on_ties(database, tie_probes(query)):
        found.append(TIES)
    with contextlib.suppress(QueryError):
        rows = run_query(database, query, timeout_s=_TIMEOUT_S, max_rows=2).rows
        if len(rows) == 1 and not any(rows[0]):
            found.append(CONSTANT)
    tree = parse(query)
    if tree is None:
        return found
    if tree.find(exp.Table) is None:
        found.append(NO_TABLE)
    for node in tree.find_all(exp.EQ, exp.NEQ, exp.Like):
        right = node.expression
        quoted = isinstance(right, exp.Column) and not right.table and right.this.args.get("quoted")
        if quoted and COLUMN not in found and _is_column(database, tree, right.name):
            found.append(COLUMN)
    return found


def _is_column(database: str, tree: Any, name: str) -> bool:
    """Whether a table of the query has a column of that name: SQLite takes an unknown name in quotes for a text."""
    from sqlglot import exp

    for table in tree.find_all(exp.Table):
        source = table.this.sql(dialect="sqlite", identify=True)
        with contextlib.suppress(QueryError):
            columns = run_query(database, f"SELECT * FROM {source} LIMIT 0").columns  # noqa: S608 - quoted
            if name.lower() in {column.lower() for column in columns}:
                return True
    return False
