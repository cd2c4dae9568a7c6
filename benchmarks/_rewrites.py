"""Rewrite a query without a change of its meaning, at random: a generator for property-based tests.

The rewritten query has the same result on every database whose columns hold the gold's types.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import sqlglot
from sqlglot import exp

__all__ = ["rewrite"]


def rewrite(sql: str, rng: random.Random) -> str:
    """Up to four random rewrites of ``sql``, one after the other; ``sql`` itself if none applies."""
    tree = sqlglot.parse_one(sql, read="sqlite")
    for _ in range(4):
        choices = [(node, change) for node in tree.walk() for change in _CHANGES.get(type(node), ())]
        if not choices:
            break
        node, change = rng.choice(choices)
        new = change(node)
        if new is None:
            continue
        if node.parent is None:
            tree = new
        else:
            node.replace(new)
    return tree.sql(dialect="sqlite")


def _swapped(kind: type[Any]) -> Callable[[Any], Any]:
    return lambda node: kind(this=node.expression.copy(), expression=node.this.copy())


def _negated(kind: type[Any]) -> Callable[[Any], Any]:
    return lambda node: exp.Not(this=exp.Paren(this=kind(this=node.this.copy(), expression=node.expression.copy())))


def _between(node: Any) -> Any:
    low = exp.GTE(this=node.this.copy(), expression=node.args["low"].copy())
    return exp.Paren(
        this=exp.And(this=low, expression=exp.LTE(this=node.this.copy(), expression=node.args["high"].copy()))
    )


def _in_list(node: Any) -> Any:
    if not node.expressions:
        return None
    terms = [exp.EQ(this=node.this.copy(), expression=each.copy()) for each in node.expressions]
    return exp.Paren(this=exp.or_(*terms))


def _count(node: Any) -> Any:
    return exp.Count(this=exp.Literal.number(1)) if isinstance(node.this, exp.Star) else None


def _wrapped(node: Any) -> Any:
    """``SELECT * FROM (query)``, only for a whole query without an order, whose rows may come in any order."""
    if node.parent is not None or node.find(exp.Order) or any(isinstance(each, exp.Star) for each in node.expressions):
        return None
    return exp.select("*").from_(exp.Subquery(this=node.copy(), alias=exp.TableAlias(this=exp.to_identifier("q"))))


def _true_filter(node: Any) -> Any:
    return exp.Where(
        this=exp.And(
            this=exp.Paren(this=node.this.copy()),
            expression=exp.EQ(this=exp.Literal.number(1), expression=exp.Literal.number(1)),
        )
    )


_CHANGES: dict[type[Any], tuple[Callable[[Any], Any], ...]] = {
    exp.GT: (_swapped(exp.LT), _negated(exp.LTE)),
    exp.LT: (_swapped(exp.GT), _negated(exp.GTE)),
    exp.GTE: (_swapped(exp.LTE), _negated(exp.LT)),
    exp.LTE: (_swapped(exp.GTE), _negated(exp.GT)),
    exp.NEQ: (_negated(exp.EQ),),
    exp.EQ: (_swapped(exp.EQ),),
    exp.Between: (_between,),
    exp.In: (_in_list,),
    exp.Count: (_count,),
    exp.Select: (_wrapped,),
    exp.Where: (_true_filter,),
}
