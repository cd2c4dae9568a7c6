"""The messages of the SQL agents: texts with ``{fields}``, which a run can replace by their names.

The system message has everything that is the same in all turns of a rollout, so one cached prefix serves every turn:
with several rollouts per question and several turns per rollout, most prompt tokens are computed once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from groundwire.tools.errors import UserError
from groundwire.tools.sql.answers import fenced_sql

CORRECT, INCORRECT = "CORRECT", "INCORRECT"
DONE = "DONE"

QUERY_TOOL: dict[str, Any] = {
    "name": "query_database_by_sql",
    "description": "Run one SQLite query and read its rows.",
    "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]},
    "strict": False,
}
"""The tool of a tool-calling agent, as in a request. It is in every prompt, so it is short."""

_QUERY = ("question", "sql", "result")
FIELDS: dict[str, tuple[str, ...]] = {
    "system": ("table_info",),
    "write": ("question",),
    "check": _QUERY,
    "rewrite": (*_QUERY, "feedback"),
    "answer": _QUERY,
    "tool_system": ("table_info",),
    "prose_system": ("table_info",),
    "ask": ("question",),
}
"""The names of the prompts, and the fields of each: of the agent that writes queries in text, then of the one that runs
them with :data:`QUERY_TOOL`. A tool's reply is the rendered rows or ``Error: ...``.
"""
_TITLES = {"table_info": "Tables", "question": "Question", "sql": "Query", "result": "Result", "feedback": "Check"}

_FENCED = "```sql\n{sql}\n```"
_TOOL_SYSTEM = (
    "You answer questions about a SQLite database. Run queries with query_database_by_sql until the rows answer the "
    "question, then"
)
SHORT: dict[str, str] = {
    "system": (
        "You answer questions about a SQLite database. Write one query in a ```sql block; "
        "use only these tables:\n{table_info}"
    ),
    "write": "Question: {question}\nWrite the query.",
    "check": f"Question: {{question}}\nQuery:\n{_FENCED}\nResult: {{result}}\nIs the query {CORRECT} or {INCORRECT}?",
    "rewrite": (
        f"Question: {{question}}\nQuery:\n{_FENCED}\nResult: {{result}}\nCheck: {{feedback}}\nWrite a better query."
    ),
    "answer": (
        f"Question: {{question}}\nQuery:\n{_FENCED}\nResult: {{result}}\n"
        "Answer the question in whole sentences, in its own language, with nothing that the result does not say."
    ),
    "tool_system": (
        f"{_TOOL_SYSTEM} reply {DONE}: the last query is the answer. Use only these tables:\n{{table_info}}"
    ),
    "prose_system": (
        f"{_TOOL_SYSTEM} answer it in whole sentences, in its own language, with nothing that the rows do not say. "
        "Use only these tables:\n{table_info}"
    ),
    "ask": "Question: {question}",
}
"""The short prompts of the starter and of pretraining."""

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
_EXPERT = "You are an expert in SQL and answer questions about a database. Its dialect is SQLite."
_EXACTLY = "Select exactly what the question asks for, in its order, and nothing else. Never change the data."

FULL: dict[str, str] = {
    **SHORT,
    "system": (
        f"{_EXPERT} Use only the tables and columns below, each column of the table that has it. {_EXACTLY}"
        "\n\nThe tables:\n{table_info}"
    ),
    "write": "Question: {question}\n\nWrite one SQLite query that answers it, in a ```sql block.",
    "check": (
        f"Question: {{question}}\n\nSQLite query:\n{_FENCED}\n\nResult:\n{{result}}\n\n"
        "Does the query answer the question? Look for these common mistakes:\n"
        f"{_LIST}\n\nName each mistake in one sentence. Do not write a corrected query. State your verdict in the last "
        f"line: VERDICT: {CORRECT}, or VERDICT: {INCORRECT}."
    ),
    "rewrite": (
        f"Question: {{question}}\n\nSQLite query:\n{_FENCED}\n\nResult:\n{{result}}\n\nCheck:\n{{feedback}}\n\n"
        "Write a better SQLite query, without the mistakes that the check names, in a ```sql block."
    ),
    "tool_system": (
        f"{_EXPERT} Run queries with query_database_by_sql until the rows answer the question. {_EXACTLY} Before you "
        f"finish, check the last query for these mistakes:\n{_LIST}\nThen reply {DONE}: the last query is the answer."
        "\n\nThe tables:\n{table_info}"
    ),
}
"""The prompts for language models that read instructions, with rules and common mistakes."""
PROFILES = {"short": SHORT, "full": FULL}

_VERDICT = re.compile(r"\b(?:IN)?CORRECT\b")


class UnknownPromptError(UserError, ValueError):
    """A prompt has a name that the agent does not have."""


def texts(profile: str, names: tuple[str, ...], replaced: Mapping[str, str] | None = None) -> dict[str, str]:
    """The texts ``names`` of a profile, with those of ``replaced`` in their place.

    Raises :class:`UnknownPromptError` for a replaced one that is none of ``names``.
    """
    replaced = replaced or {}
    if unknown := sorted(replaced.keys() - set(names)):
        raise UnknownPromptError(f"prompts: the agent has no prompt {unknown[0]!r:.60}; it has {', '.join(names)}")
    return {name: replaced.get(name, PROFILES[profile][name]) for name in names}


def write(name: str, *values: str, own: Mapping[str, str] = SHORT) -> str:
    """The message ``name`` of the texts ``own`` with the values of its :data:`FIELDS`, in their order."""
    return fill(own[name], dict(zip(FIELDS[name], values, strict=True)))


def fill(template: str, values: Mapping[str, str]) -> str:
    """``template`` with the values in place of their fields; a value without a field in the text stands at its end.

    So an agent has its data with any text, also one that a model wrote. Other braces stay as they are.
    """
    # In one pass, because a value may itself contain a field.
    fields = "|".join(re.escape(f"{{{name}}}") for name in values)
    filled = re.sub(fields, lambda field: values[field.group()[1:-1]], template)
    missing = [f"{_TITLES[name]}: {value}" for name, value in values.items() if f"{{{name}}}" not in template]
    return "\n".join([filled, *missing])


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
