"""Wrong queries that resemble a gold query, for the turns after a first query."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

__all__ = ["wrong_query"]

_SWAPS = {"avg": "max", "max": "min", "min": "sum", "sum": "avg", "desc": "ASC", "asc": "DESC", ">": "<", "<": ">"}
_SWAPS |= {"and": "OR", "or": "AND", ">=": ">", "<=": "<", "distinct": "", "count": "sum", "intersect": "UNION"}
_TOKENS = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|\w+|[<>=!]+|\s+|.", re.DOTALL)
_CLAUSE = re.compile(r"\s+(?:WHERE|LIMIT|ORDER BY|GROUP BY|HAVING|AND|EXCEPT|INTERSECT|UNION)\s.*", re.I | re.DOTALL)


def wrong_query(rng: random.Random, gold: str, names: Sequence[str], others: Sequence[str]) -> str:
    """Another query than ``gold``: with another name or operator, without a clause, or of another question.

    ``names`` are those of the schema, ``others`` the golds of other questions about the database. The result of the
    query can still be the right one: compare it.
    """
    for _ in range(8):
        tokens = _TOKENS.findall(gold)
        kind = rng.randrange(5)
        if kind == 0 and others:
            changed = rng.choice(others)
        elif kind == 1:
            changed = _CLAUSE.sub("", gold, count=1)
        elif kind == 2:
            changed = "".join(_SWAPS.get(token.lower(), token) for token in tokens)
        else:
            places = [i for i, token in enumerate(tokens) if token in names]
            if places and names:
                tokens[rng.choice(places)] = rng.choice(names) if kind == 3 else rng.choice(("id", "name", "date"))
            changed = "".join(tokens)
        if changed.split() != gold.split():
            return changed
    return "SELECT 1"
