"""Wrong queries that resemble right ones, for dialogues about a query's result."""

from __future__ import annotations

import random
import re

from groundwire.domains.spider.generate.databases import Database

__all__ = ["corrupt"]

_SWAPS = {"avg": "max", "max": "min", "min": "sum", "sum": "avg", "DESC": "ASC", "ASC": "DESC", ">": "<", "<": ">"}
_SWAPS |= {"AND": "OR", "OR": "AND", ">=": ">", "<=": "<"}


def corrupt(rng: random.Random, database: Database, sql: str) -> str:
    """A wrong query that resembles ``sql``: with another name or operator, or without a clause."""
    tables = [table.name for table in database.tables]
    columns = sorted({column.name for table in database.tables for column in table.columns})
    tokens = re.findall(r"'[^']*'|\w+|[<>=!]+|\s+|.", sql)
    for _ in range(8):
        changed = list(tokens)
        kind = rng.randrange(4)
        if kind == 0:
            _replace_one(rng, changed, columns, [*columns, "name", "title", "age"])
        elif kind == 1:
            _replace_one(rng, changed, tables, [*tables, tables[0] + "s"])
        elif kind == 2:
            changed = list(re.sub(r" (WHERE|LIMIT|ORDER BY|GROUP BY|AND|EXCEPT) .*", "", sql))
        else:
            changed = [_SWAPS.get(token, token) for token in tokens]
        if "".join(changed) != sql:
            return "".join(changed)
    return f"SELECT {rng.choice(columns)} FROM {tables[-1]} LIMIT 2"  # noqa: S608


def _replace_one(rng: random.Random, tokens: list[str], old: list[str], new: list[str]) -> None:
    places = [i for i, token in enumerate(tokens) if token in old]
    if places:
        tokens[rng.choice(places)] = rng.choice(new)
