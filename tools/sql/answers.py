"""Queries in texts: how one is found in an agent's result, what people are shown of it, and its syntax tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from groundwire.tools.sql.errors import QueryError
from groundwire.tools.sql.query import is_query, render, run_query
from groundwire.tools.types import TEXT, AgentResult, AgentStep, AnswerKind, Candidate

_SHOWN_ROWS = 200  # characters of a query's rows
_MAX_CHARS = 4000  # a longer text is hardly an attempt at a query, and parsing it takes time

_DIALECTS = r"sqlite|sql|(?:postgres(?:ql)?|mysql|mariadb|duckdb|oracle|tsql|plsql|bigquery|snowflake)\b"
_LANGUAGE = rf"(?!(?:select|with|values|explain)\b)[\w+#.-]+[ \t]*\r?\n|{_DIALECTS}"
_FENCE = re.compile(rf"```[ \t]*(?:{_LANGUAGE})?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
"""A fenced block. A word of its own after the first fence names the language, whatever it is, unless it is SQL."""


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


class SqlAnswers(AnswerKind):
    """The query in the result: fenced, or a text that begins as one; else the last query that a tool was given."""

    name = "sql"
    fields = ("sql", "query", "sql_query")

    def read(self, result: AgentResult) -> Candidate | None:
        """As described; without any query it is the result's text."""
        for text, field in result.candidates:
            fenced = fenced_sql(text)
            if fenced is not None or is_query(text):
                return Candidate(text.strip() if fenced is None else fenced, field)
        for step in reversed(result.steps):
            if step["kind"] == "tool" and is_query(step["input"]):
                return Candidate(step["input"], "the last query of a tool call")
        return super().read(result)

    def tried(self, steps: Sequence[AgentStep]) -> list[int]:
        """The tool calls with a query; the input of others is their arguments as JSON."""
        return [
            index
            for index, step in enumerate(steps)
            if step["kind"] == "tool" and not step["input"].lstrip().startswith(("{", "["))
        ]

    def details(self, answer: str, database: str) -> str:
        """The first rows that the query returns."""
        if not database:
            return ""
        try:
            return f"rows {render(run_query(database, answer), max_chars=_SHOWN_ROWS)}"
        except QueryError as error:
            return f"rows none: {error}"


SQL = SqlAnswers()
KINDS: dict[str, AnswerKind] = {kind.name: kind for kind in (TEXT, SQL)}
"""By the name that a reward or a domain gives as its ``form``."""
