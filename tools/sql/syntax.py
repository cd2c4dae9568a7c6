"""The query in a text, and its syntax tree by sqlglot."""

from __future__ import annotations

import re
from typing import Any

_MAX_CHARS = 4000
"""A longer text is hardly an attempt at a query, and parsing it takes time."""

_DIALECTS = r"sqlite|sql|(?:postgres(?:ql)?|mysql|mariadb|duckdb|oracle|tsql|plsql|bigquery|snowflake)\b"
_LANGUAGE = rf"(?!(?:select|with|values|explain)\b)[\w+#.-]+[ \t]*\r?\n|{_DIALECTS}"
_FENCE = re.compile(rf"```[ \t]*(?:{_LANGUAGE})?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
"""A fenced block. A word of its own after the first fence names the language, whatever it is, unless it is SQL."""


_QUERY = re.compile(r"\s*(--[^\n]*\n\s*)*(select|with)\b", re.IGNORECASE)


def is_query(text: str) -> bool:
    """Whether ``text`` begins like an SQL query."""
    return _QUERY.match(text) is not None


def fenced_sql(reply: str) -> str | None:
    """The last fenced block of a reply, or None if there is none."""
    blocks = _FENCE.findall(reply)
    return blocks[-1].strip() if blocks else None


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
