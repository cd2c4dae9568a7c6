"""Golds that are probably wrong, the most suspicious first.

Some reasons need no model: a result without rows or without information, an ORDER BY whose ties decide what LIMIT
keeps, a text in double quotes that is the name of a column, which SQLite then reads instead of the text, a name in a
subquery that is a column of the outer query only, and numbers that are stored, and so compared, as text. Another needs
sampled answers: more of them agree on another result than on the gold's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from groundwire.domains._types import Task
from groundwire.domains.text_to_sql.golds import Gold, GoldProblem, gold_of
from groundwire.domains.text_to_sql.numbers_as_text import compares_numbers_as_text
from groundwire.tools.sql import QueryError, run_query
from groundwire.tools.sql.syntax import parse_query
from groundwire.tools.variants.ties import depends_on_ties, tie_probes

__all__ = ["COLUMN", "CONSTANT", "CONTRADICTED", "NO_TABLE", "NUMBERS", "OUTER", "TIES", "suspects"]

TIES = "ties decide its result"
CONSTANT = "its result is only NULL or 0"
NO_TABLE = "it reads no table"
COLUMN = "a text in double quotes is a column"
OUTER = "a name in a subquery is a column of the outer query only"
NUMBERS = "it compares numbers that are stored as text"
CONTRADICTED = "sampled answers agree on another result"
_TRUST = {TIES: 0.5, CONSTANT: 0.4, NO_TABLE: 0.1, COLUMN: 0.3, OUTER: 0.2, NUMBERS: 0.2}
_TRUST_WITH_PROBLEM = 0.2
_TIMEOUT_S, _ANSWER_TIMEOUT_S = 5.0, 1.0
_MAX_ROWS = 5000
_MIN_AGREEING = 2


def suspects(
    tasks: Iterable[Task],
    problems: Mapping[Gold, GoldProblem],
    answers: Mapping[str, Sequence[str]] | None = None,
    *,
    on_end: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """One row for each task with a suspicious gold: id, db_id, question, query, reasons and ``trust``, 0 to 1.

    ``problems`` are those that :func:`groundwire.domains.text_to_sql.golds.check_golds` found. ``answers`` are sampled
    queries by the id of their task; a row then has how many of them agree (``sampled``). Lowest trust first.
    ``corrected_query`` is empty, for people to fill in (:mod:`groundwire.domains.text_to_sql.gold_trust`).
    ``on_end`` is called after each task.
    """
    reasons: dict[Gold, list[str]] = {}
    rows = []
    for task in tasks:
        on_end()
        gold = gold_of(task)
        if gold not in reasons:
            reasons[gold] = [] if gold in problems else _reasons(*gold)
        trust = [_TRUST[reason] for reason in reasons[gold]]
        listed = list(reasons[gold])
        if gold in problems:
            trust.append(_TRUST_WITH_PROBLEM)
            listed.append(problems[gold].reason)
        sampled = _agreement(*gold, (answers or {}).get(str(task["id"]), ()))
        if sampled is not None:
            trust.append(sampled.pop("trust"))
            listed.append(CONTRADICTED)
        if listed:
            columns = {name: task[name] for name in ("id", "db_id", "question", "query")}
            more = {"sampled": sampled} if sampled is not None else {}
            rows.append({**columns, "reasons": listed, **more, "trust": min(trust), "corrected_query": ""})
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
    tree = parse_query(query)
    if tree is None:
        return found
    if tree.find(exp.Table) is None:
        found.append(NO_TABLE)
    for node in tree.find_all(exp.EQ, exp.NEQ, exp.Like):
        right = node.expression
        quoted = isinstance(right, exp.Column) and not right.table and right.this.args.get("quoted")
        # SQLite takes an unknown name in quotes for a text.
        if quoted and COLUMN not in found and right.name.lower() in _columns(database, tree):
            found.append(COLUMN)
    if any(_is_outer(database, column) for column in tree.find_all(exp.Column)):
        found.append(OUTER)
    if compares_numbers_as_text(database, tree):
        found.append(NUMBERS)
    return found


def _is_outer(database: str, column: Any) -> bool:
    """Whether a column without a table's name is in a subquery whose own tables do not have it, and outer ones do."""
    from sqlglot import exp

    select = column.find_ancestor(exp.Select)
    if column.table or column.this.args.get("quoted") or select is None or select.parent_select is None:
        return False
    if not select.find_ancestor(exp.Subquery, exp.In, exp.Exists) or select.find_ancestor(exp.From, exp.CTE):
        return False
    name, own = column.name.lower(), _columns(database, select)
    derived = any(select.find_all(exp.CTE)) or any(isinstance(each.this, exp.Select) for each in _sources(select))
    aliases = {each.alias.lower() for each in select.expressions if each.alias}
    return bool(own) and not derived and name not in own | aliases and name in _columns(database, select.root())


def _sources(select: Any) -> list[Any]:
    first = select.args.get("from_") or select.args.get("from")
    return [each.this for each in (first, *(select.args.get("joins") or ())) if each is not None]


def _columns(database: str, tree: Any) -> set[str]:
    """The columns of all tables in ``tree``, in lower case."""
    from sqlglot import exp

    tables = {table.this.sql(dialect="sqlite", identify=True) for table in tree.find_all(exp.Table)}
    return set[str]().union(*(_columns_of(database, table) for table in tables))


@lru_cache(maxsize=4096)
def _columns_of(database: str, table: str) -> frozenset[str]:
    with contextlib.suppress(QueryError):
        columns = run_query(database, f"SELECT * FROM {table} LIMIT 0").columns  # noqa: S608 - quoted
        return frozenset(column.lower() for column in columns)
    return frozenset()


def _agreement(database: str, query: str, answers: Sequence[str]) -> dict[str, Any] | None:
    """How many answers agree with the gold, and with each other if these are more; else None.

    An answer that fails, or returns nothing, agrees with none.
    """
    counts, examples = Counter[frozenset[Any]](), dict[frozenset[Any], str]()
    for answer, times in Counter(answers).items():
        if result := _result(database, answer, _ANSWER_TIMEOUT_S):
            counts[result] += times
            examples.setdefault(result, answer)
    agrees = counts.pop(_result(database, query, _TIMEOUT_S) or frozenset(), 0)
    [(other, most)] = counts.most_common(1) or [(frozenset(), 0)]
    if most < max(_MIN_AGREEING, agrees + 1):
        return None
    return {
        "answers": len(answers),
        "agree_with_gold": agrees,
        "agree_with_each_other": most,
        "example": examples[other],
        "trust": round((agrees + 1) / (agrees + most + 2), 3),
    }


def _result(database: str, query: str, timeout_s: float) -> frozenset[Any] | None:
    """The set of a result's rows, whatever the order of rows and columns; None if the query fails."""
    with contextlib.suppress(QueryError):
        rows = run_query(database, query, timeout_s=timeout_s, max_rows=_MAX_ROWS).rows
        return frozenset(tuple(sorted(row, key=lambda value: str(value) + str(type(value)))) for row in rows)
    return None
