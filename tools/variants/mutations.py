"""Near misses of a gold query: one change each, as a policy makes them.

Filters dropped or changed, columns swapped, MIN for MAX, DISTINCT, joins and limits changed, sets combined in another
way. A query that sqlglot cannot parse has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sqlglot import exp

from groundwire.tools.sql.answers import parse_query

_MAX_MUTATIONS = 60
_COMPARISONS: dict[Any, tuple[Any, ...]] = {
    exp.GT: (exp.GTE, exp.LT),
    exp.GTE: (exp.GT, exp.LTE),
    exp.LT: (exp.LTE, exp.GT),
    exp.LTE: (exp.LT, exp.GTE),
    exp.EQ: (exp.NEQ, exp.GTE),
    exp.NEQ: (exp.EQ,),
    exp.Like: (exp.EQ,),
    exp.And: (exp.Or,),
    exp.Or: (exp.And,),
}
"""What a condition becomes: one that policies confuse with it."""


def mutations(gold: str, columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Queries with one change each, at most sixty. ``columns`` are those of each table, all names in lower case."""
    tree = parse_query(gold)
    if tree is None:
        return []
    queries: dict[str, None] = {}
    with contextlib.suppress(RecursionError):
        for index, node in enumerate(list(tree.walk())):
            for change in _changes(node, columns):
                copy = tree.copy()
                target = next(candidate for i, candidate in enumerate(copy.walk()) if i == index)
                changed = change(target)  # of the root it is the new query; elsewhere the tree is changed in place
                changed = changed if target is copy and changed is not None else copy
                queries.setdefault(changed.sql(dialect="sqlite"))
        queries.pop(tree.sql(dialect="sqlite"), None)
    return list(queries)[:_MAX_MUTATIONS]


def memorised(gold: str, value_of: Callable[[str], Any]) -> list[str]:
    """``gold`` with a part replaced by its value: a subquery, the sort key of the first row, the difference to a count.

    ``value_of`` returns the only value of a query's result; None if there is none.
    """
    tree = parse_query(gold)
    queries: list[str] = []
    for index, node in enumerate(list(tree.find_all(exp.Subquery)) if tree is not None else ()):
        if isinstance(node.parent, (exp.Binary, exp.Between)) and (value := value_of(node.this.sql(dialect="sqlite"))):
            copy = tree.copy()
            _replace(list(copy.find_all(exp.Subquery))[index], exp.convert(value))
            queries.append(copy.sql(dialect="sqlite"))
    table = tree.find(exp.Table) if tree is not None else None
    if table is not None and isinstance(number := value_of(gold), int):
        counted = f"SELECT COUNT(*) FROM {table.this.sql(dialect='sqlite', identify=True)}"  # noqa: S608 - quoted
        if (rows := value_of(counted)) not in (None, number):
            queries.append(counted.replace("FROM", f"+ {number - rows} FROM", 1))
    order = tree.args.get("order") if isinstance(tree, exp.Select) else None
    key = order.expressions[0].this if order is not None and tree.args.get("limit") is not None else None
    if isinstance(key, exp.Column) and not tree.args.get("group") and not _is_text(key):
        first = tree.copy()
        first.set("expressions", [key.copy()])
        if (value := value_of(first.sql(dialect="sqlite"))) is not None:
            copy = tree.copy()
            copy.set("order", None)
            copy.set("limit", None)
            queries.append(copy.where(exp.EQ(this=key.copy(), expression=exp.convert(value))).sql(dialect="sqlite"))
    return queries


def _changes(node: Any, columns: Mapping[str, Sequence[str]]) -> Iterator[Any]:
    """Functions that change a copy of ``node`` in its tree."""
    if isinstance(node, exp.Select):
        yield from _select_changes(node, columns)
    elif isinstance(node, exp.AggFunc):
        yield from _aggregate_changes(node)
    elif isinstance(node, exp.Join):
        yield from _join_changes(node)
    elif isinstance(node, exp.SetOperation):
        for kind in (exp.Union, exp.Intersect, exp.Except):
            if kind is not type(node):
                yield lambda copy, kind=kind: _replace(
                    copy, kind(this=copy.this.copy(), expression=copy.expression.copy(), distinct=True)
                )
        yield lambda copy: _replace(copy, copy.this.copy())
    elif isinstance(node, (exp.Where, exp.Having, exp.Limit, exp.Order)):
        yield lambda copy: copy.pop() and None
    elif isinstance(node, exp.Ordered):
        desc = not node.args.get("desc")
        # SQLite's own place of NULL, or the text would have NULLS FIRST.
        yield lambda copy: _replace(copy, exp.Ordered(this=copy.this.copy(), desc=desc, nulls_first=not desc))
    else:
        yield from _condition_changes(node)


def _condition_changes(node: Any) -> Iterator[Any]:
    if isinstance(node, (exp.And, exp.Or)):
        yield lambda copy: _replace(copy, copy.left)
        yield lambda copy: _replace(copy, copy.right)
    elif isinstance(node, exp.Not):
        yield lambda copy: _replace(copy, copy.this)
    elif isinstance(node, exp.Literal) and not node.is_string and _is_int(node.this):
        for number in (int(node.this) + 1, int(node.this) - 1):
            if number >= 0:
                yield lambda copy, number=number: _replace(copy, exp.Literal.number(number))
    for kind in _COMPARISONS.get(type(node), ()):
        yield lambda copy, kind=kind: _replace(copy, kind(this=copy.left, expression=copy.right))
    if isinstance(node, exp.EQ) and isinstance(_value(node.expression), str):
        begins = exp.Literal.string(f"{_value(node.expression)}%")
        yield lambda copy: _replace(copy, exp.Like(this=copy.left, expression=begins))


def _replace(node: Any, new: Any) -> Any:
    if node.parent is not None:
        node.replace(new)
    return new


def _aggregate_changes(node: Any) -> Iterator[Any]:
    inner = node.this
    if isinstance(node, exp.Count):
        if isinstance(inner, exp.Distinct) and len(inner.expressions) == 1:
            yield lambda copy: copy.set("this", copy.this.expressions[0])
        elif isinstance(inner, exp.Column) and not isinstance(inner.this, exp.Star):
            yield lambda copy: copy.set("this", exp.Distinct(expressions=[copy.this]))
        return
    if not isinstance(node, exp.Min | exp.Max | exp.Sum | exp.Avg):
        return
    for kind in (exp.Min, exp.Max, exp.Sum, exp.Avg):
        if kind is not type(node):
            yield lambda copy, kind=kind: _replace(copy, kind(this=copy.this.copy()))


def _select_changes(node: Any, columns: Mapping[str, Sequence[str]]) -> Iterator[Any]:
    if node.args.get("distinct"):
        yield lambda copy: copy.set("distinct", None)
    elif isinstance(node.parent, exp.Subquery | exp.In) or all(copy.find(exp.AggFunc) for copy in node.expressions):
        pass  # it makes no difference there
    elif not node.args.get("group"):
        yield lambda copy: copy.set("distinct", exp.Distinct())
    tables = {t.alias_or_name.lower(): t.name.lower() for t in node.find_all(exp.Table)}
    for position, selected in enumerate(node.expressions):
        column = selected.find(exp.Column)
        if column is None or isinstance(column.this, exp.Star):
            continue
        name, owner = column.name.lower(), tables.get(column.table.lower(), "")
        owners = [owner] if owner else list(tables.values())
        siblings = next((list(columns[o]) for o in owners if name in columns.get(o, ())), [])
        for sibling in _next_two(siblings, name):
            yield (
                lambda copy, position=position, sibling=sibling: (
                    copy.expressions[position].find(exp.Column).set("this", exp.to_identifier(sibling, quoted=True))
                )
            )


def _next_two(names: list[str], name: str) -> list[str]:
    at = names.index(name) if name in names else 0
    return [other for other in (names[at + 1 :] + names[:at])[:2] if other != name]


def _join_changes(node: Any) -> Iterator[Any]:
    side = None if node.args.get("side") else "LEFT"
    yield lambda copy: copy.set("side", side)
    used = {column.table.lower() for column in node.parent_select.find_all(exp.Column)} if node.parent_select else set()
    on = {column.table.lower() for column in node.find_all(exp.Column)}
    if node.this.alias_or_name.lower() not in used - on:
        yield lambda copy: copy.pop() and None


def _is_int(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def literals(gold: str) -> tuple[dict[str, list[Any]], list[int], list[tuple[str, str]]]:
    """The values that ``gold`` compares columns with (by column name, in lower case), the numbers that it compares
    counts with, and the pairs of column names that it compares with one another."""
    tree = parse_query(gold)
    values: dict[str, list[Any]] = {}
    counts: list[int] = []
    pairs: list[tuple[str, str]] = []
    if tree is None:
        return values, counts, pairs
    kinds = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Like, exp.Between, exp.In)
    for node in tree.find_all(*kinds):
        parts = [node.this, *(node.args.get(key) for key in ("expression", "low", "high")), *node.expressions]
        names = [operand.name.lower() for operand in parts if isinstance(operand, exp.Column) and not _is_text(operand)]
        compared = [value for operand in parts if operand is not None and (value := _value(operand)) is not None]
        if isinstance(node.this, exp.AggFunc):
            counts += [value for value in compared if isinstance(value, int)]
        elif len(names) == 2 and isinstance(node, exp.EQ):
            pairs.append((names[0], names[1]))
        for name in names[:1]:
            values.setdefault(name, []).extend(compared)
    return values, counts, pairs


def _is_text(column: Any) -> bool:
    """SQLite takes a name in double quotes for a text if no column has it, and Spider writes texts so."""
    return not column.table and bool(column.this.args.get("quoted"))


def _value(node: Any) -> Any:
    if isinstance(node, exp.Neg):
        inner = _value(node.this)
        return -inner if isinstance(inner, (int, float)) else None
    if isinstance(node, exp.Column):
        return node.name if _is_text(node) else None
    if not isinstance(node, exp.Literal):
        return None
    if node.is_string:
        return node.this
    with contextlib.suppress(ValueError):
        return int(node.this) if _is_int(node.this) else float(node.this)
    return None
