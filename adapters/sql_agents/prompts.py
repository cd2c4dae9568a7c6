"""The short prompts of the SQL agents, for the starter's backends and pretraining.

:mod:`groundwire.adapters.sql_agents.full_prompts` has those for larger models.

The system message has everything that is the same in all turns of a rollout, so one cached prefix serves every turn:
with several rollouts per question and several turns per rollout, most prompt tokens are computed once.
"""

from __future__ import annotations

import re
from typing import Any

from groundwire.tools.sql.syntax import fenced_sql

__all__ = [
    "CORRECT",
    "DONE",
    "INCORRECT",
    "QUERY_TOOL",
    "answer_message",
    "ask_message",
    "check_message",
    "extract_sql",
    "fence",
    "is_correct",
    "prose_system_message",
    "rewrite_message",
    "system_message",
    "tool_system_message",
    "write_message",
]

CORRECT, INCORRECT = "CORRECT", "INCORRECT"
DONE = "DONE"

QUERY_TOOL: dict[str, Any] = {
    "name": "query_database_by_sql",
    "description": "Run one SQLite query and read its rows.",
    "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]},
    "strict": False,
}
"""The tool of a tool-calling agent, as in a request. It is in every prompt, so it is short."""

_VERDICT = re.compile(r"\b(?:IN)?CORRECT\b")


def system_message(table_info: str) -> str:
    """The system message of every turn."""
    return (
        "You answer questions about a SQLite database. Write one query in a ```sql block; "
        "use only these tables:\n" + table_info
    )


def tool_system_message(table_info: str) -> str:
    """The system message of an agent that runs its queries with :data:`QUERY_TOOL`.

    The user's message is :func:`write_message`; a tool's reply is the rendered rows or ``Error: ...``. The answer is
    the last query that ran, so it need not be repeated, or the fenced block of the final reply if there is one.
    """
    return (
        "You answer questions about a SQLite database. Run queries with query_database_by_sql until the rows answer "
        f"the question, then reply {DONE}: the last query is the answer. Use only these tables:\n" + table_info
    )


def prose_system_message(table_info: str) -> str:
    """The system message of an agent that reads the database with :data:`QUERY_TOOL` and answers in prose.

    The user's message is :func:`ask_message`; the final reply is the answer.
    """
    return (
        "You answer questions about a SQLite database. Run queries with query_database_by_sql until the rows answer "
        "the question, then answer it in whole sentences, in its own language, with nothing that the rows do not say. "
        "Use only these tables:\n" + table_info
    )


def ask_message(question: str) -> str:
    """The question to an agent that answers in prose."""
    return f"Question: {question}"


def write_message(question: str) -> str:
    """Ask for the first query."""
    return f"Question: {question}\nWrite the query."


def check_message(question: str, sql: str, result: str) -> str:
    """Ask whether an executed query answers the question."""
    return f"Question: {question}\nQuery:\n{fence(sql)}\nResult: {result}\nIs the query {CORRECT} or {INCORRECT}?"


def rewrite_message(question: str, sql: str, result: str, feedback: str) -> str:
    """Ask for another query, with the result of the check."""
    return f"Question: {question}\nQuery:\n{fence(sql)}\nResult: {result}\nCheck: {feedback}\nWrite a better query."


def answer_message(question: str, sql: str, result: str) -> str:
    """Ask for the answer in prose, after the last query."""
    return (
        f"Question: {question}\nQuery:\n{fence(sql)}\nResult: {result}\n"
        "Answer the question in whole sentences, in its own language, with nothing that the result does not say."
    )


def fence(sql: str) -> str:
    """``sql`` as a fenced block."""
    return f"```sql\n{sql}\n```"


def extract_sql(reply: str) -> str:
    """The last fenced block of a reply, or the whole reply if there is none."""
    sql = fenced_sql(reply)
    return reply.strip() if sql is None else sql


def is_correct(reply: str) -> bool:
    """Whether a check's last verdict is CORRECT; False without a verdict."""
    verdicts = _VERDICT.findall(reply)
    return bool(verdicts) and verdicts[-1] == CORRECT
