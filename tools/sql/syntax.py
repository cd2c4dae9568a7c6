"""The syntax tree of a query, by sqlglot."""

from __future__ import annotations

from typing import Any

__all__ = ["parse_query"]

_MAX_CHARS = 4000
"""A longer text is hardly an attempt at a query, and parsing it takes time."""


def parse_query(sql: str) -> Any:
    """The syntax tree of one query; None if the text is anything else, or too long."""
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    if len(sql) > _MAX_CHARS:
        return None
    try:
        statements = sqlglot.parse(sql, read="sqlite")
    except (SqlglotError, RecursionError):
        return None
    return statements[0] if len(statements) == 1 and isinstance(statements[0], exp.Query) else None
