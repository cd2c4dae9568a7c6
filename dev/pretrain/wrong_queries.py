"""First queries, right ones and wrong ones that resemble them, for dialogues about a query's result."""

from __future__ import annotations

import random
import re

from dev.spider_data.databases import Database

__all__ = ["corrupt", "first_query"]

_RIGHT = 0.75
"""The share of right first queries, like that of the policy's own. With 0.2 it learns to reject right queries."""
_SWAPS = {"avg": "max", "max": "min", "min": "sum", "sum": "avg", "DESC": "ASC", "ASC": "DESC", ">": "<", "<": ">"}
_SWAPS |= {"AND": "OR", "OR": "AND", ">=": ">", "<=": "<"}


def first_query(rng: random.Random, database: Database, sql: str) -> str:
    """What an agent may have written first for a question that ``sql`` answers: ``sql``, or a wrong query."""
    return sql if rng.random() < _RIGHT else corrupt(rng, database, sql)


def corrupt(rng: random.Random, database: Database, sql: str) -> str:
    """A wrong query that resembles ``sql``: with another name or operator, or without a clause."""
    tables = [table.name for table in database.tables]
    columns = sorted({column.name for table in database.tables for column in table.columns})
    tokens = re.findall(r"'[^']*'|\w+|[<>=!]+|\s+|.", sql)
    for _ in range(8):
        changed = list(tokens)
        kind = rng.choice((0, 0, 0, 1, 1, 1, 2, 3))  # most wrong queries of the policy have a wrong name, and fail
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
        place, name = rng.choice(places), rng.choice(new)
        half = len(tokens[place]) // 2 if rng.random() < 0.5 else 0  # a name that no table has
        tokens[place] = tokens[place][:half] + name[half:]
