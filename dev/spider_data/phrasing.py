"""The parts of a question: openings, conditions and superlatives, each in several phrasings."""

from __future__ import annotations

import random
from typing import NamedTuple

from dev.spider_data.databases import Column, Database, Link, Table
from dev.spider_data.lexicon import NUMBERS, PHRASINGS

__all__ = ["AGGREGATES", "Condition", "Pair", "Writer", "join_sql"]

Pair = tuple[str, str]
"""A question and its query."""
AGGREGATES = {
    "avg": ("average", "mean"),
    "max": ("maximum", "highest", "largest", "greatest"),
    "min": ("minimum", "lowest", "smallest", "least"),
    "sum": ("total", "summed"),
}
_PLACES = ("city", "country", "state", "hometown", "county", "continent", "region")


class Condition(NamedTuple):
    """A condition on one column, in words and in SQL."""

    text: str
    sql: str
    column: Column


def join_sql(child: Table, link: Link, parent: Table) -> str:
    """The two tables of a link, joined."""
    return f"{parent.name} JOIN {child.name} ON {parent.name}.id = {child.name}.{link.column}"


class Writer:
    """Random choices about a database and one of its tables: ``source`` in SQL, ``singular`` and ``plural`` in words.

    ``freedom`` is the probability that a phrasing is chosen among all, and not only among the plainer first half.
    """

    def __init__(self, rng: random.Random, database: Database, freedom: float) -> None:
        self.rng, self.database, self.freedom = rng, database, freedom
        self.table = rng.choice(database.tables)
        self.source, self.singular, self.plural = self.table.name, self.table.singular, self.table.plural

    def say(self, *phrasings: str) -> str:
        """One of ``phrasings``, which are listed plainest first."""
        free = self.rng.random() < self.freedom
        return self.rng.choice(phrasings if free else phrasings[: (len(phrasings) + 1) // 2])

    def column(self, kinds: str, table: Table | None = None, *, other_than: tuple[str, ...] = ()) -> Column:
        """A random column of one of ``kinds``; raises IndexError if there is none."""
        columns = (table or self.table).columns
        return self.rng.choice([c for c in columns if c.kind in kinds.split() and c.name not in other_than])

    def value(self, column: Column, table: Table | None = None) -> str:
        """A random value of ``column``, as text."""
        table = table or self.table
        return str(self.rng.choice(table.rows)[table.columns.index(column)])

    def link(self) -> tuple[Table, Link, Table]:
        """A child table, its link, and the parent; raises IndexError if there are no links."""
        link = self.rng.choice(self.database.links)
        return self.database.table(link.child), link, self.database.table(link.parent)

    def aggregate(self) -> tuple[str, str]:
        """An SQL aggregate and a word for it."""
        name = self.rng.choice(sorted(AGGREGATES))
        return name, self.say(*AGGREGATES[name])

    def one(self) -> str:
        """The opening of a question for one value."""
        return self.say(*PHRASINGS["one"])

    def many(self) -> str:
        """The opening of a question for several values."""
        return self.say(*PHRASINGS["many"])

    def many_of(self, column: Column) -> str:
        """The opening of a question for the values of ``column``."""
        opening = self.many()
        several = opening.startswith("What are") or self.rng.random() < 0.5
        return f"{opening} {column.plural if several else column.singular}"

    def condition(
        self, table: Table | None = None, *, other_than: tuple[str, ...] = (), qualified: bool = False
    ) -> Condition:
        """A condition that some rows meet, or nearly meet: its value is one of the table's."""
        table = table or self.table
        column = self.column("number category", table, other_than=other_than)
        value = self.value(column, table)
        target = f"{table.name}.{column.name}" if qualified else column.name
        if column.kind == "category":
            return self._category_condition(column, value, target)
        return self._number_condition(column, value, target)

    def _category_condition(self, column: Column, value: str, target: str) -> Condition:
        if self.rng.random() < 0.12:
            return Condition(self._phrase("!=", column, value), f"{target} != '{value}'", column)
        more = PHRASINGS["place"] if column.name in _PLACES else []
        return Condition(self._phrase("category", column, value, *more), f"{target} = '{value}'", column)

    def _number_condition(self, column: Column, value: str, target: str) -> Condition:
        number = NUMBERS[column.attribute]
        operator = self.rng.choice((">", "<", "=", ">", "<", ">=", "<="))
        comparative = {">": number.more, "<": number.less}.get(operator)
        more = [f"{comparative} than {{value}}"] if comparative and column.name == column.attribute else []
        return Condition(self._phrase(operator, column, value, *more), f"{target} {operator} {value}", column)

    def _phrase(self, kind: str, column: Column, value: str, *more: str) -> str:
        name = column.singular
        article = "an" if name[0] in "aeiou" else "a"
        return self.say(*PHRASINGS[kind], *more).format(name=name, a_name=f"{article} {name}", value=value)

    def extreme(self, column: Column, noun: str, *, several: bool = False) -> tuple[str, str]:
        """``noun`` with the highest or lowest ``column`` in words, and the sort direction."""
        high = self.rng.random() < 0.6
        name, number = column.singular, NUMBERS[column.attribute]
        adjective = number.most if high else number.least
        words = ("highest", "largest", "greatest", "most") if high else ("lowest", "smallest", "least", "fewest")
        phrasings = [
            f"{noun} with the {self.say(*words[:2])} {name}",
            f"{noun} that {'have' if several else 'has'} the {self.say(*words)} {name}",
        ]
        phrasings.append(f"{noun} having the {self.say(*words)} {name}")
        if adjective and column.name == column.attribute:
            phrasings.insert(1, f"{adjective} {noun}")
        return self.say(*phrasings), "DESC" if high else "ASC"
