"""The prompts of the SQL agents for language models that read instructions: the profile ``full``.

The functions are those of :mod:`groundwire.adapters.sql_agents.prompts`, which has the short prompts of the starter.
"""

from __future__ import annotations

from groundwire.adapters.sql_agents.prompts import (
    CORRECT,
    DONE,
    INCORRECT,
    answer_message,
    ask_message,
    fence,
    prose_system_message,
)

__all__ = [
    "MISTAKES",
    "answer_message",
    "ask_message",
    "check_message",
    "prose_system_message",
    "rewrite_message",
    "system_message",
    "tool_system_message",
    "write_message",
]

MISTAKES = (
    "NOT IN with a list or subquery that can contain NULL",
    "UNION where equal rows must be kept (UNION ALL), or UNION ALL where they must not",
    "BETWEEN, whose two bounds are included, for a range that excludes one of them",
    "a comparison of values of different types, such as a number and a text",
    "names and texts in the wrong quotes: identifiers take double quotes, texts single ones",
    "a function with a wrong number of arguments",
    "a missing cast, or a cast to the wrong type, also in a division of whole numbers",
    "a join over columns that do not belong together, or a join that repeats rows",
    "columns that the question does not ask for, or a missing DISTINCT, GROUP BY, ORDER BY or LIMIT",
    "an error message in place of a result",
    "an implausible result: no rows, only NULL, or values that cannot answer the question",
)
"""The mistakes that a check looks for."""
_LIST = "\n".join(f"- {mistake}" for mistake in MISTAKES)


def system_message(table_info: str) -> str:
    """The system message of every turn."""
    return (
        "You are an expert in SQL and answer questions about a database. Its dialect is SQLite. Use only the tables "
        "and columns below, each column of the table that has it. Select exactly what the question asks for, in its "
        "order, and nothing else. Never change the data.\n\nThe tables:\n" + table_info
    )


def tool_system_message(table_info: str) -> str:
    """The system message of an agent that runs its queries with a tool."""
    return (
        "You are an expert in SQL and answer questions about a database. Its dialect is SQLite. Run queries with "
        "query_database_by_sql until the rows answer the question. Select exactly what the question asks for, in its "
        "order, and nothing else. Never change the data. Before you finish, check the last query for these mistakes:\n"
        f"{_LIST}\nThen reply {DONE}: the last query is the answer.\n\nThe tables:\n{table_info}"
    )


def write_message(question: str) -> str:
    """Ask for the first query."""
    return f"Question: {question}\n\nWrite one SQLite query that answers it, in a ```sql block."


def check_message(question: str, sql: str, result: str) -> str:
    """Ask for the mistakes of an executed query, and for a verdict."""
    return (
        f"Question: {question}\n\nSQLite query:\n{fence(sql)}\n\nResult:\n{result}\n\n"
        "Does the query answer the question? Look for these common mistakes:\n"
        f"{_LIST}\n\nName each mistake in one sentence. Do not write a corrected query. State your verdict in the last "
        f"line: VERDICT: {CORRECT}, or VERDICT: {INCORRECT}."
    )


def rewrite_message(question: str, sql: str, result: str, feedback: str) -> str:
    """Ask for another query, with the result of the check."""
    return (
        f"Question: {question}\n\nSQLite query:\n{fence(sql)}\n\nResult:\n{result}\n\nCheck:\n{feedback}\n\n"
        "Write a better SQLite query, without the mistakes that the check names, in a ```sql block."
    )
