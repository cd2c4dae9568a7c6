"""Random small databases about one subject: tables that refer to one another, with rows.

No two tables of a database have the same number of rows, and the numbers of a column rarely repeat, so a wrong query
seldom returns the right rows by accident.
"""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass, field

from dev.spider_data.lexicon import (
    ADJECTIVES,
    CATEGORIES,
    FIRST_NAMES,
    LAST_NAMES,
    MODIFIERS,
    NUMBERS,
    SUBJECTS,
    SYLLABLES,
    THINGS,
)

__all__ = ["Column", "Database", "Link", "Table", "fill", "make_database", "schema_text"]

Value = int | str


class _Named:
    name: str

    @property
    def singular(self) -> str:
        """The name as a question writes it."""
        return self.name.replace("_", " ")

    @property
    def plural(self) -> str:
        """The plural of the name, as a question writes it."""
        word = self.singular
        if word.endswith("y") and word[-2:-1] not in "aeiou":
            return word[:-1] + "ies"
        if word.endswith("s") and not word.endswith("ss"):
            return word
        return word + ("es" if word.endswith(("ss", "x", "ch", "sh")) else "s")


@dataclass(frozen=True)
class Column(_Named):
    """``kind`` is ``key``, ``name``, ``number``, ``category`` or ``link``; ``attribute`` is its lexicon entry."""

    name: str
    kind: str
    attribute: str = ""

    @property
    def type(self) -> str:
        """The declared SQL type."""
        return "text" if self.kind in ("name", "category") else "int"


@dataclass
class Table(_Named):
    """An entity with its columns and its rows."""

    name: str
    entity_kind: str
    columns: list[Column]
    rows: list[list[Value]] = field(default_factory=list)


@dataclass(frozen=True)
class Link:
    """``child.column`` holds the ``id`` of a row of ``parent``."""

    child: str
    column: str
    parent: str


@dataclass
class Database:
    """A schema and its contents."""

    db_id: str
    subject: str
    tables: list[Table]
    links: list[Link]

    def table(self, name: str) -> Table:
        """The table called ``name``."""
        return next(table for table in self.tables if table.name == name)


def make_database(
    rng: random.Random,
    subject: str,
    *,
    db_id: str = "",
    invented: float = 0.0,
    n_tables: tuple[int, ...] = (2, 2, 3, 3, 4),
    n_attributes: tuple[int, ...] = (2, 3, 3, 4),
) -> Database:
    """A database about ``subject``.

    ``invented`` is the probability that its entities come from all subjects or are made-up words, and that its
    attributes belong to other kinds of entity: a policy should copy names from the schema and not from memory.
    """
    entities = dict(SUBJECTS[subject])
    free = rng.random() < invented
    if free:
        everything = [(name, kind) for entities in SUBJECTS.values() for name, kind in entities.items()]
        entities = dict(rng.sample(everything, 5))
        if rng.random() < 0.25:
            entities |= {_made_up_word(rng): rng.choice("plteo") for _ in range(2)}
    names = rng.sample(sorted(entities), rng.choice(n_tables))
    database = Database(db_id or subject, subject, [], [])
    for i, name in enumerate(names):
        kind = entities[name]
        columns = [Column("id", "key"), Column(_name_column(rng, name, kind), "name")]
        columns += _attributes(rng, rng.choice("plteo") if free else kind, rng.choice(n_attributes), made_up=free)
        if i and (i == 1 or rng.random() < 0.8):
            parent = rng.choice(names[:i])
            columns.append(Column(f"{parent}_id", "link", parent))
            database.links.append(Link(name, f"{parent}_id", parent))
        database.tables.append(Table(name, kind, list({column.name: column for column in columns}.values())))
    sizes = rng.sample(range(9, 24), len(names))
    for table, size in zip(database.tables, sizes, strict=True):
        table.rows = _rows(rng, database, table, size)
    return database


def schema_text(database: Database) -> str:
    """The schema as in a prompt: what ``groundwire.tools.schema`` prints for the SQLite file, without keys."""
    return "\n".join(
        f"CREATE TABLE {table.name} ( {' , '.join(f'{column.name} {column.type}' for column in table.columns)} )"
        for table in database.tables
    )


def fill(database: Database, path: str = ":memory:") -> sqlite3.Connection:
    """Write the database to ``path`` and return the open connection. Small pages keep a file at a few kilobytes."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA page_size = 512")
    for table in database.tables:
        parts = [f"{c.name} {c.type}{' primary key' if c.kind == 'key' else ''}" for c in table.columns]
        parts += [
            f"foreign key ({k.column}) references {k.parent}(id)" for k in database.links if k.child == table.name
        ]
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(parts)})")
        marks = ",".join("?" * len(table.columns))
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)  # noqa: S608
    connection.commit()
    return connection


def _made_up_word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3)))) + "n"


def _name_column(rng: random.Random, entity: str, kind: str) -> str:
    own = "full_name" if kind == "p" else "title" if kind in "te" else "label"
    return rng.choice(("name", "name", "name", f"{entity.split('_', maxsplit=1)[0]}_name", own))


def _attributes(rng: random.Random, kind: str, count: int, *, made_up: bool) -> list[Column]:
    numbers = [name for name, number in NUMBERS.items() if kind in number.kinds]
    categories = [name for name, category in CATEGORIES.items() if kind in category.kinds]
    n_numbers = rng.randint(1, count - 1)
    chosen = [(name, "number") for name in rng.sample(numbers, n_numbers)]
    chosen += [(name, "category") for name in rng.sample(categories, count - n_numbers)]
    columns = []
    for attribute, column_kind in chosen:
        chance = rng.random()
        name = attribute
        if chance < 0.15:
            name = f"{rng.choice(MODIFIERS[column_kind])}_{attribute}"
        elif made_up and chance < 0.3:
            name = _made_up_word(rng)
        columns.append(Column(name, column_kind, attribute))
    rng.shuffle(columns)
    return columns


def _rows(rng: random.Random, database: Database, table: Table, size: int) -> list[list[Value]]:
    columns = [_values(rng, database, table, column, size) for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _values(rng: random.Random, database: Database, table: Table, column: Column, size: int) -> list[Value]:
    if column.kind == "key":
        return list(range(1, size + 1))
    if column.kind == "name":
        first, second = (FIRST_NAMES, LAST_NAMES) if table.entity_kind == "p" else (ADJECTIVES, THINGS)
        return rng.sample([f"{a} {b}" for a in first for b in second], size)
    if column.kind == "number":
        number = NUMBERS[column.attribute]
        population = range(number.low, number.high + 1)
        return rng.sample(population, size) if len(population) > size else [rng.choice(population) for _ in range(size)]
    if column.kind == "category":
        values = CATEGORIES[column.attribute].values
        few = rng.sample(values, min(len(values), rng.choice((3, 4, 5))))
        return [rng.choice(few) for _ in range(size)]
    # Low ids are more frequent and the highest never occur: some parents have many children, some have none.
    return [1 + int(len(database.table(column.attribute).rows) * rng.random() ** 1.7 * 0.8) for _ in range(size)]
