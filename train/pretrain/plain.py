"""Questions made of nothing but a schema's names, and their queries: practice in finding and copying names.

The generator's questions are about its own small databases; real schemas are wider, and their names are written in
every way. Here any schema will do, and nothing is executed: a query is right by construction.
"""
# ruff: noqa: S608 (these queries are read, never run)

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groundwire.domains.spider.generate.phrasing import plural
from groundwire.train.pretrain.schemas import tables_of

__all__ = ["plain_question"]

_LEADS = ("Show", "List", "Find", "Give me", "Return", "What are", "Tell me")
_AGGREGATES = (
    *(("max", word) for word in ("maximum", "largest")),
    *(("min", word) for word in ("minimum", "smallest")),
    *(("avg", word) for word in ("average", "mean")),
    ("sum", "total"),
)
_SIGNS = ((">", "more than"), (">", "above"), ("<", "less than"), ("<", "below"), ("=", ""), ("=", "equal to"))
_VALUES = ("Baker", "Lima", "red", "active", "Summer Show", "Toyota", "VIP", "north", "Jones", "Math", "USA", "open")


@dataclass(frozen=True)
class _Column:
    name: str
    number: bool

    @property
    def said(self) -> str:
        return _said(self.name)


@dataclass(frozen=True)
class _Table:
    name: str
    columns: Sequence[_Column]

    @property
    def things(self) -> str:
        """What its rows are, in the plural."""
        said = _said(self.name)
        return said if said.endswith("s") else plural(said)

    def number(self, rng: random.Random) -> _Column:
        """One of its numbers, or of its columns where there is none."""
        return rng.choice([column for column in self.columns if column.number] or self.columns)


Pair = tuple[str, str]


def plain_question(rng: random.Random, schema: str) -> Pair | None:
    """A question about one table of ``schema`` and its query; None where no table's names do without quotes."""
    tables = tables_of(schema)
    if not tables:
        return None
    name, listed = rng.choice(list(tables.items()))
    columns = [_Column(column, kind != "text") for column, kind in (each.split()[:2] for each in listed)]
    question, sql = rng.choices(_FORMS, _WEIGHTS)[0](rng, _Table(name, columns))
    return question + ("?" if question.startswith(("What", "How", "Which")) else "."), sql


def _count(rng: random.Random, table: _Table) -> Pair:
    where, condition = _condition(rng, table)
    question = rng.choice((f"How many {table.things}{where} are there", f"Count the {table.things}{where}"))
    return question, f"SELECT count(*) FROM {table.name}{condition}"


def _aggregate(rng: random.Random, table: _Table) -> Pair:
    where, condition = _condition(rng, table)
    column, (function, word) = table.number(rng), rng.choice(_AGGREGATES)
    question = f"What is the {word} {column.said} of {rng.choice(('all', 'the'))} {table.things}{where}"
    return question, f"SELECT {function}({column.name}) FROM {table.name}{condition}"


def _groups(rng: random.Random, table: _Table) -> Pair:
    column = rng.choice(table.columns)
    each = (f"How many {table.things} are there for each {column.said}", f"Count the {table.things} per {column.said}")
    return rng.choice(each), f"SELECT {column.name}, count(*) FROM {table.name} GROUP BY {column.name}"


def _most(rng: random.Random, table: _Table) -> Pair:
    column, (word, order) = rng.choice(table.columns), rng.choice((("most", "DESC"), ("fewest", "ASC")))
    sql = f"SELECT {column.name} FROM {table.name} GROUP BY {column.name} ORDER BY count(*) {order} LIMIT 1"
    return f"Which {column.said} has the {word} {table.things}", sql


def _extreme(rng: random.Random, table: _Table) -> Pair:
    said, names = _some(rng, table)
    column, (word, order) = table.number(rng), rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    question = f"{rng.choice(_LEADS)} the {said} of the {_said(table.name)} with the {word} {column.said}"
    return question, f"SELECT {names} FROM {table.name} ORDER BY {column.name} {order} LIMIT 1"


def _listed(rng: random.Random, table: _Table) -> Pair:
    (said, names), (where, condition) = _some(rng, table), _condition(rng, table)
    different, distinct = ("different ", "DISTINCT ") if "," not in names and rng.random() < 0.2 else ("", "")
    question = f"{rng.choice(_LEADS)} the {different}{said} of {rng.choice(('all', 'the'))} {table.things}{where}"
    sql = f"SELECT {distinct}{names} FROM {table.name}{condition}"
    if rng.random() < 0.25:
        column = rng.choice(table.columns)
        way, order = rng.choice(((" in descending order", "DESC"), (" descending", "DESC"), ("", "ASC")))
        question += f" {rng.choice(('sorted', 'ordered'))} by {column.said}{way}"
        sql += f" ORDER BY {column.name} {order}"
    return question, sql


_FORMS: Sequence[Callable[[random.Random, _Table], Pair]] = (_count, _aggregate, _groups, _most, _extreme, _listed)
_WEIGHTS = (15, 15, 12, 8, 12, 38)


def _some(rng: random.Random, table: _Table) -> Pair:
    """Some of the columns, in words and in SQL."""
    chosen = rng.sample(table.columns, min(len(table.columns), rng.choice((1, 1, 2, 2, 3, 4))))
    *first, last = (column.said for column in chosen)
    return f"{', '.join(first)} and {last}" if first else last, ", ".join(column.name for column in chosen)


def _condition(rng: random.Random, table: _Table) -> Pair:
    """A clause for the question and one for the query; more often than not, both are empty."""
    if rng.random() < 0.6:
        return "", ""
    column = rng.choice(table.columns)
    if column.number:
        sign, word = rng.choice(_SIGNS)
        shown = value = str(rng.choice((rng.randint(1, 100), rng.randint(1900, 2020))))
    else:
        sign, word, shown = "=", "", rng.choice(_VALUES)
        value = f"'{shown}'"
        shown = rng.choice((shown, value, f'"{shown}"'))
    lead = rng.choice((f" whose {column.said} is ", f" with {column.said} "))
    return f"{lead}{word} {shown}".replace("  ", " "), f" WHERE {column.name} {sign} {value}"


def _said(name: str) -> str:
    """A name as a person says it: ``Song_releaseYear`` is ``song release year``."""
    return re.sub(r"_+|(?<=[a-z0-9])(?=[A-Z])", " ", name).strip().lower()
