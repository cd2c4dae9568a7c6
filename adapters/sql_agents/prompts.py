"""The messages of the SQL agents: texts with ``{fields}`` in ``prompts.toml``, which a run can replace by their names.

The system message has everything that is the same in all turns of a rollout, so one cached prefix serves every turn:
with several rollouts per question and several turns per rollout, most prompt tokens are computed once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire.tools.errors import UserError
from groundwire.tools.files import parse_toml
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

_PROFILES = parse_toml(Path(__file__).with_name("prompts.toml").read_text("utf-8"))
_MISTAKES = "\n".join(f"- {mistake}" for mistake in _PROFILES["mistakes"])
SHORT: dict[str, str] = _PROFILES["short"]
"""The short prompts of the starter and of pretraining."""
FULL = SHORT | {name: text.replace("{mistakes}", _MISTAKES) for name, text in _PROFILES["full"].items()}
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
