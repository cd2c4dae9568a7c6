"""The schema of a database as other people's agents show it."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable

from dev.spider_data.databases import Database, Table, schema_text

__all__ = ["format_schema", "schema_formats"]

SchemaFormat = Callable[[list[Table]], str]


def schema_formats(rng: random.Random, database: Database, connection: sqlite3.Connection) -> SchemaFormat:
    """One random format, which writes any of the database's tables."""
    formats = (_statements, _statements, _statements, _layout, _layout, _own, _list, _list, _json)
    return rng.choice(formats)(rng, database, connection)


def format_schema(rng: random.Random, database: Database, connection: sqlite3.Connection) -> str:
    """The whole schema in a random format."""
    return schema_formats(rng, database, connection)(database.tables)


def _statements(rng: random.Random, database: Database, connection: sqlite3.Connection) -> SchemaFormat:
    """The statements that made the tables, as ``sqlite_master`` has them."""
    sql = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
    end = rng.choice(("", "", ";"))
    separator = rng.choice(("\n", "\n", "\n\n"))
    return lambda tables: separator.join(sql[table.name] + end for table in tables)


def _layout(rng: random.Random, database: Database, connection: sqlite3.Connection) -> SchemaFormat:
    """Statements in another layout: a line for each column, other types, quotes, keys, sample rows."""
    types = rng.choice(({"int": "INTEGER", "text": "TEXT"}, {"int": "INT", "text": "VARCHAR(50)"}, {}))
    quote = rng.choice(("", "", "", '"', "`"))
    indent = rng.choice(("\t", "  ", "    "))
    create = rng.choice(("CREATE TABLE", "CREATE TABLE", "create table", "CREATE TABLE IF NOT EXISTS"))
    keys, sample = rng.random() < 0.6, rng.random() < 0.3
    end = rng.choice(("", ";"))

    def one(table: Table) -> str:
        lines = [f"{quote}{column.name}{quote} {types.get(column.type, column.type)}" for column in table.columns]
        if keys:
            lines.append(f"PRIMARY KEY ({quote}id{quote})")
            lines += [
                f"FOREIGN KEY({quote}{link.column}{quote}) REFERENCES {quote}{link.parent}{quote} ({quote}id{quote})"
                for link in database.links
                if link.child == table.name
            ]
        text = f"{create} {quote}{table.name}{quote} (\n" + "".join(f"{indent}{line}, \n" for line in lines)
        text = text.rstrip(", \n") + f"\n){end}"
        if sample:
            rows = "\n".join("\t".join(map(str, row)) for row in table.rows[:3])
            heads = "\t".join(column.name for column in table.columns)
            text += f"\n\n/*\n3 rows from {table.name} table:\n{heads}\n{rows}\n*/"
        return text

    return lambda tables: "\n\n".join(map(one, tables))


def _own(rng: random.Random, database: Database, connection: sqlite3.Connection) -> SchemaFormat:
    return lambda tables: schema_text(Database(database.db_id, database.subject, tables, []))


def _list(rng: random.Random, database: Database, connection: sqlite3.Connection) -> SchemaFormat:
    """A line for each table or column."""
    pattern, separator, between = rng.choice(
        (
            ("{table}({columns})", ", ", "\n"),
            ("- {table}: {columns}", ", ", "\n"),
            ("Table {table}: {columns}", ", ", "\n"),
            ("{table} ({columns})", ", ", "\n"),
            ("Table: {table}\n  - {columns}", "\n  - ", "\n\n"),
            ("# {table}\n{columns}", "\n", "\n\n"),
            ("Table {table}\n{columns}", "\n", "\n"),
            ("{table} | {columns}", " , ", "\n"),
        )
    )
    column_text = rng.choice(("{name}", "{name}", "{name} {type}", "{name} ({type})", "{name}: {type}"))

    def one(table: Table) -> str:
        columns = [column_text.format(name=column.name, type=column.type) for column in table.columns]
        return pattern.format(table=table.name, columns=separator.join(columns))

    return lambda tables: between.join(map(one, tables))


def _json(rng: random.Random, database: Database, connection: sqlite3.Connection) -> SchemaFormat:
    typed, indent = rng.random() < 0.4, rng.choice((None, None, 2))

    def write(tables: list[Table]) -> str:
        value = {t.name: {c.name: c.type for c in t.columns} if typed else [c.name for c in t.columns] for t in tables}
        return json.dumps(value, indent=indent)

    return write
