"""Whether the result of a query depends on the order in which SQLite happens to read rows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from sqlglot import exp

from groundwire.tools.sql import QueryError, run_query
from groundwire.tools.sql.answers import parse_query

TieProbe = tuple[str, int, int | None]
"""A query without its limit and with its sort keys as last columns, the number of keys, the last row of its limit."""

_TIMEOUT_S = 1.0
_MAX_ROWS = 5000


def tie_probes(gold: str) -> list[TieProbe]:
    """The probes of all SELECTs of ``gold`` with ORDER BY; without those that sqlglot cannot change."""
    tree = parse_query(gold)
    if tree is None:
        return []
    probes: list[TieProbe] = []
    with contextlib.suppress(RecursionError):
        for select in tree.find_all(exp.Select):
            # An order without a limit matters at the end of the query only.
            if select.args.get("order") and (select.args.get("limit") or select is tree):
                probes.append(_probe(select.copy()))
    return probes


def _probe(select: Any) -> TieProbe:
    aliases = {alias.alias.lower(): alias.this for alias in select.expressions if isinstance(alias, exp.Alias)}
    keys = []
    for ordered in select.args["order"].expressions:
        key = ordered.this
        if isinstance(key, exp.Column) and not key.table and key.name.lower() in aliases:
            key = aliases[key.name.lower()]
        elif isinstance(key, exp.Literal) and not key.is_string and 0 < int(key.this) <= len(select.expressions):
            key = select.expressions[int(key.this) - 1].unalias()
        keys.append(key.copy())
    limit, offset = (_number(select.args.get(name)) for name in ("limit", "offset"))
    last = None if limit is None else limit + (offset or 0)
    select.set("limit", None)
    select.set("offset", None)
    select.set("expressions", [*select.expressions, *keys])
    return select.sql(dialect="sqlite"), len(keys), last


def _number(node: Any) -> int | None:
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        return int(node.expression.this)
    return None


def depends_on_ties(database: str, probes: Sequence[TieProbe], *, equal_rows: bool = False) -> bool:
    """Whether two different rows with equal sort keys meet where their order, or the limit, makes a difference.

    With ``equal_rows`` equal rows count, too, where a limit cuts them: a query for all rows with the largest value has
    another result there.
    """
    for sql, keys, last in probes:
        try:
            rows = run_query(database, sql, timeout_s=_TIMEOUT_S, max_rows=_MAX_ROWS).rows
        except QueryError:  # the probe of a correlated subquery
            continue
        end = len(rows) if last is None else last + 1
        for index, (row, following) in enumerate(itertools.pairwise(rows[:end])):
            cut = equal_rows and index + 1 == last
            if row[-keys:] == following[-keys:] and (cut or row[:-keys] != following[:-keys]):
                return True
    return False
