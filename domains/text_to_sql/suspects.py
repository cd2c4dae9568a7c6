"""Golds that are probably wrong, the most suspicious first.

Some reasons need no model: a result without rows or without information, an ORDER BY whose ties decide what LIMIT
keeps, a text in double quotes that is the name of a column, which SQLite then reads instead of the text, a name in a
subquery that is a column of the outer query only, and numbers that are stored, and so compared, as text. Another needs
sampled answers: more of them agree on another result than on the gold's.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from sqlglot import exp

from groundwire.domains._types import Task
from groundwire.domains.text_to_sql.golds import Gold, GoldProblem, gold_of
from groundwire.tools.sql import QueryError, quote_identifier, run_query, sorted_row
from groundwire.tools.sql.answers import parse_query
from groundwire.tools.terminal import progress
from groundwire.tools.variants.ties import depends_on_ties, tie_probes

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
_NUMBER = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*")
_SHARE = 0.8  # of a column's texts, those that must read as numbers: others may be words for a missing value
_SAMPLE = 2000


def suspects(
    tasks: Sequence[Task],
    problems: Mapping[Gold, GoldProblem],
    answers: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """One row for each task with a suspicious gold: id, db_id, question, query, reasons and ``trust``, 0 to 1.

    ``problems`` are those that :func:`groundwire.domains.text_to_sql.golds.check_golds` found. ``answers`` are sampled
    queries by the id of their task; a row then has how many of them agree (``sampled``). Lowest trust first.
    ``corrected_query`` is empty, for people to fill in (:mod:`groundwire.domains.text_to_sql.golds`). Shows a progress
    bar on a terminal.
    """
    reasons: dict[Gold, list[str]] = {}
    rows = []
    with progress("Looking for wrong golds", len(tasks)) as advance:
        for task in tasks:
            gold = gold_of(task)
            if gold not in reasons:
                reasons[gold] = [problems[gold].reason] if gold in problems else _reasons(*gold)
            trust = {reason: _TRUST.get(reason, _TRUST_WITH_PROBLEM) for reason in reasons[gold]}
            more = {}
            if (sampled := _agreement(*gold, answers.get(str(task["id"]), ()))) is not None:
                trust[CONTRADICTED], more = sampled.pop("trust"), {"sampled": sampled}
            if trust:
                columns = {name: task[name] for name in ("id", "db_id", "question", "query")}
                least = min(trust.values())
                rows.append({**columns, "reasons": list(trust), **more, "trust": least, "corrected_query": ""})
            advance()
    return sorted(rows, key=lambda row: float(row["trust"]))


def _reasons(database: str, query: str) -> list[str]:
    rows = list[Any]()
    with contextlib.suppress(QueryError):
        rows = run_query(database, query, timeout_s=_TIMEOUT_S, max_rows=2).rows
    signs = {TIES: depends_on_ties(database, tie_probes(query)), CONSTANT: len(rows) == 1 and not any(rows[0])}
    if (tree := parse_query(query)) is not None:
        # SQLite takes an unknown name in quotes for a text.
        compared = [node.expression for node in tree.find_all(exp.EQ, exp.NEQ, exp.Like)]
        quoted = [column for column in compared if _is_bare(column) and column.this.args.get("quoted")]
        signs[NO_TABLE] = tree.find(exp.Table) is None
        signs[COLUMN] = any(column.name.lower() in _columns(database, tree) for column in quoted)
        signs[OUTER] = any(_is_outer(database, column) for column in tree.find_all(exp.Column))
        signs[NUMBERS] = _compares_numbers_as_text(database, tree)
    return [reason for reason, is_seen in signs.items() if is_seen]


def _is_bare(node: Any) -> bool:
    return isinstance(node, exp.Column) and not node.table


def _is_outer(database: str, column: Any) -> bool:
    """Whether a column without a table's name is in a subquery whose own tables do not have it, and outer ones do."""
    select = column.find_ancestor(exp.Select)
    if not _is_bare(column) or column.this.args.get("quoted") or select is None or select.parent_select is None:
        return False
    if not select.find_ancestor(exp.Subquery, exp.In, exp.Exists) or select.find_ancestor(exp.From, exp.CTE):
        return False
    clauses = (select.args.get("from_") or select.args.get("from"), *(select.args.get("joins") or ()))
    sources = [clause.this for clause in clauses if clause is not None]
    name, own = column.name.lower(), _columns(database, select)
    derived = any(select.find_all(exp.CTE)) or any(isinstance(expression.this, exp.Select) for expression in sources)
    aliases = {expression.alias.lower() for expression in select.expressions if expression.alias}
    return bool(own) and not derived and name not in own | aliases and name in _columns(database, select.root())


def _columns(database: str, tree: Any) -> set[str]:
    """The columns of all tables in ``tree``, in lower case."""
    return set[str]().union(*(_columns_of(database, _quoted(table)) for table in tree.find_all(exp.Table)))


def _quoted(table: Any) -> str:
    return str(table.this.sql(dialect="sqlite", identify=True))


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
        return frozenset(map(sorted_row, rows))
    return None


def _compares_numbers_as_text(database: str, tree: Any) -> bool:
    """Whether a CAST to a number changes the result of the gold query with the syntax ``tree``.

    SQLite puts the text '9' after '10'. The query orders, takes MAX or MIN of, or compares a column of such texts.
    """
    changed = tree.copy()
    # The table's own name in quotes, by the name under which the query uses it.
    tables = {(table.alias_or_name.lower(), _quoted(table)) for table in tree.find_all(exp.Table)}
    nodes = changed.find_all(exp.Max, exp.Min, exp.Ordered, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between)
    if not any([_cast(database, tables, node) for node in list(nodes)]):
        return False
    results = []
    for query in (tree, changed):
        with contextlib.suppress(QueryError):
            rows = run_query(database, query.sql(dialect="sqlite"), max_rows=_MAX_ROWS).rows
            numbers = [tuple(map(_as_number, row)) for row in rows]
            results.append(numbers if tree.args.get("order") else Counter(numbers))
    return len(results) == 2 and results[0] != results[1]


def _cast(database: str, tables: Collection[tuple[str, str]], node: Any) -> bool:
    """Cast the columns of such texts in a comparison, sort key, MAX or MIN, and the texts they are compared with."""
    operands = (node.this, *(node.args.get(name) for name in ("expression", "low", "high")))
    columns = [
        operand
        for operand in operands
        if isinstance(operand, exp.Column)
        and any(
            _are_numbers(database, table, operand.name)
            for alias, table in tables
            if operand.table.lower() in ("", alias)
        )
    ]
    texts = [operand for operand in operands if isinstance(operand, exp.Literal) and operand.is_string]
    for operand in (*columns, *texts) if columns else ():
        operand.replace(exp.Cast(this=operand.copy(), to=exp.DataType.build("REAL")))
    return bool(columns)


@lru_cache(maxsize=4096)
def _are_numbers(database: str, table: str, column: str) -> bool:
    """Whether the texts of a column read as numbers; no if the table does not have the column."""
    if column.lower() not in _columns_of(database, table):
        return False  # SQLite would take the name for a text
    name = quote_identifier(column)
    try:
        sql = f"SELECT {name} FROM {table} WHERE typeof({name}) = 'text' LIMIT {_SAMPLE}"  # noqa: S608
        texts = [row[0] for row in run_query(database, sql).rows]
    except QueryError:
        return False
    return bool(texts) and sum(_NUMBER.fullmatch(text) is not None for text in texts) >= _SHARE * len(texts)


def _as_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
