"""Answers that are queries: how one is found in an agent's result, and what people are shown of it."""

from __future__ import annotations

from collections.abc import Sequence

from groundwire.tools.sql.errors import QueryError
from groundwire.tools.sql.query import render, run_query
from groundwire.tools.sql.syntax import fenced_sql, is_query
from groundwire.tools.types import TEXT, AgentResult, AgentStep, AnswerKind, Candidate

_SHOWN_ROWS = 200
"""Characters of a query's rows."""


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
