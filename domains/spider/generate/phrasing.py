"""How questions are put: openings, conditions and superlatives, each in several phrasings.

``Writer.say`` picks one of several phrasings, which are listed plainest first. ``freedom`` is the chance that a choice
is made among all of them, and not among the first half.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from groundwire.domains.spider.generate.databases import Column, Database, Link, Table
from groundwire.domains.spider.generate.lexicon import NUMBERS

__all__ = ["AGGREGATES", "Condition", "Pair", "Writer", "plural", "spoken", "with_article"]

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


def spoken(name: str) -> str:
    """A name as it is said."""
    return name.replace("_", " ")


def plural(name: str) -> str:
    """The plural of a name, as it is said."""
    word = spoken(name)
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return word[:-1] + "ies"
    if word.endswith("s") and not word.endswith("ss"):
        return word
    return word + ("es" if word.endswith(("ss", "x", "ch", "sh")) else "s")


def with_article(said: str) -> str:
    """``an area``, ``a price``."""
    return f"{'an' if said[0] in 'aeiou' else 'a'} {said}"


class Writer:
    """What a template needs: one table of one database, and random choices about it."""

    def __init__(self, rng: random.Random, database: Database, freedom: float) -> None:
        self.rng, self.database, self.freedom = rng, database, freedom
        self.table = rng.choice(database.tables)

    def say(self, *phrasings: str) -> str:
        """One of ``phrasings``, which are listed plainest first."""
        free = self.rng.random() < self.freedom
        return self.rng.choice(phrasings if free else phrasings[: (len(phrasings) + 1) // 2])

    def column(self, kinds: str, table: Table | None = None, *, other_than: tuple[str, ...] = ()) -> Column:
        """A random column of one of ``kinds``; raises IndexError where there is none."""
        columns = (table or self.table).columns
        return self.rng.choice([c for c in columns if c.kind in kinds.split() and c.name not in other_than])

    def value(self, column: Column, table: Table | None = None) -> str:
        """A value that stands in ``column``, as text."""
        table = table or self.table
        return str(self.rng.choice(table.rows)[table.columns.index(column)])

    def link(self) -> tuple[Table, Link, Table]:
        """A child table, its link, and the parent; raises IndexError where nothing is linked."""
        link = self.rng.choice(self.database.links)
        return self.database.table(link.child), link, self.database.table(link.parent)

    def aggregate(self) -> tuple[str, str]:
        """An SQL aggregate and its word."""
        name = self.rng.choice(sorted(AGGREGATES))
        return name, self.say(*AGGREGATES[name])

    def one(self) -> str:
        """How a question for one value begins."""
        return self.say(
            "What is the", "Find the", "Show the", "Give the", "Return the", "Tell me the", "Can you give me the"
        )

    def many(self) -> str:
        """How a question for several values begins."""
        return self.say(
            *("What are the", "List the", "Show the", "Find the"),
            *("Give me the", "Return the", "Please list the", "Can you show the", "I need the", "Tell me the"),
        )

    def many_of(self, column: Column) -> str:
        """How a question for the values of ``column`` begins."""
        opening = self.many()
        several = opening.startswith("What are") or self.rng.random() < 0.5
        return f"{opening} {plural(column.name) if several else spoken(column.name)}"

    def condition(
        self, table: Table | None = None, *, other_than: tuple[str, ...] = (), qualified: bool = False
    ) -> Condition:
        """A condition that at least one row meets, or nearly."""
        table = table or self.table
        column = self.column("number category", table, other_than=other_than)
        value = self.value(column, table)
        target = f"{table.name}.{column.name}" if qualified else column.name
        if column.kind == "category":
            return self._category_condition(column, value, target)
        return self._number_condition(column, value, target)

    def _category_condition(self, column: Column, value: str, target: str) -> Condition:
        said, quoted = spoken(column.name), f"'{value}'"
        if self.rng.random() < 0.12:
            text = self.say(
                f"whose {said} is not {quoted}", f"with {said} other than {quoted}", f"not having {said} {quoted}"
            )
            return Condition(text, f"{target} != {quoted}", column)
        phrasings = [f"whose {said} is {quoted}", f"with {said} {quoted}", f"that have {said} {quoted}"]
        phrasings += [f"with {quoted} as {said}", f"having {quoted} as their {said}", f"whose {said} is {value}"]
        if column.name in _PLACES:
            phrasings += [f"from {quoted}", f"from {value}"]
        return Condition(self.say(*phrasings), f"{target} = {quoted}", column)

    def _number_condition(self, column: Column, value: str, target: str) -> Condition:
        said = spoken(column.name)
        number = NUMBERS[column.attribute]
        operator = self.rng.choice((">", "<", "=", ">", "<", ">=", "<="))
        phrasings = {
            ">": [
                f"whose {said} is greater than {value}",
                f"with {said} above {value}",
                f"with {said} more than {value}",
                f"whose {said} is over {value}",
                f"having {with_article(said)} higher than {value}",
                f"whose {said} exceeds {value}",
            ],
            "<": [
                f"whose {said} is less than {value}",
                f"with {said} below {value}",
                f"with {said} less than {value}",
                f"whose {said} is under {value}",
                f"having {with_article(said)} lower than {value}",
                f"with {said} smaller than {value}",
            ],
            "=": [
                f"whose {said} is {value}",
                f"with {said} {value}",
                f"with {said} equal to {value}",
                f"having {with_article(said)} of {value}",
            ],
            ">=": [
                f"whose {said} is at least {value}",
                f"with {said} at least {value}",
                f"with {with_article(said)} of {value} or more",
                f"with {said} no less than {value}",
            ],
            "<=": [
                f"whose {said} is at most {value}",
                f"with {said} at most {value}",
                f"with {with_article(said)} of {value} or less",
                f"with {said} no more than {value}",
            ],
        }[operator]
        comparative = {">": number.more, "<": number.less}.get(operator)
        if comparative and column.name == column.attribute:
            phrasings.append(f"{comparative} than {value}")
        return Condition(self.say(*phrasings), f"{target} {operator} {value}", column)

    def extreme(self, column: Column, noun: str, *, several: bool = False) -> tuple[str, str]:
        """``noun`` with the highest or lowest ``column``, in words, and the direction to sort in."""
        high = self.rng.random() < 0.6
        said, number = spoken(column.name), NUMBERS[column.attribute]
        adjective = number.most if high else number.least
        words = ("highest", "largest", "greatest", "most") if high else ("lowest", "smallest", "least", "fewest")
        phrasings = [
            f"{noun} with the {self.say(*words[:2])} {said}",
            f"{noun} that {'have' if several else 'has'} the {self.say(*words)} {said}",
        ]
        phrasings.append(f"{noun} having the {self.say(*words)} {said}")
        if adjective and column.name == column.attribute:
            phrasings.insert(1, f"{adjective} {noun}")
        return self.say(*phrasings), "DESC" if high else "ASC"
