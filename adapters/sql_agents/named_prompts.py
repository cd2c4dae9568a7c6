"""The SQL agents' messages as named prompts, which a run can replace: its setting ``prompts``, ``--trainer gepa``.

A named prompt is the text of a message with ``{fields}``, for example ``Question: {question}``. The names are those of
the functions in :mod:`groundwire.adapters.sql_agents.prompts` without ``_message``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType

from groundwire.tools.errors import UserError

__all__ = ["FIELDS", "Messages", "UnknownPromptError", "check_names", "default_prompts", "fill"]

_QUERY = ("question", "sql", "result")
FIELDS: dict[str, tuple[str, ...]] = {
    "system": ("table_info",),
    "tool_system": ("table_info",),
    "prose_system": ("table_info",),
    "write": ("question",),
    "ask": ("question",),
    "check": _QUERY,
    "rewrite": (*_QUERY, "feedback"),
    "answer": _QUERY,
}
"""The names of the prompts, and the fields of each."""
_TITLES = {
    "table_info": "Tables",
    "question": "Question",
    "sql": "Query",
    "result": "Result",
    "feedback": "Check",
}


class UnknownPromptError(UserError, ValueError):
    """A prompt has a name that the agent does not have."""


class Messages:
    """The messages of a ``profile`` (a module of prompts), with ``prompts`` in place of those of their names."""

    def __init__(self, profile: ModuleType, prompts: Mapping[str, str] | None = None) -> None:
        self._profile, self._prompts = profile, prompts or {}

    def write(self, name: str, *values: str) -> str:
        """The message ``name`` with the values of its :data:`FIELDS`, in their order."""
        if name in self._prompts:
            return fill(self._prompts[name], dict(zip(FIELDS[name], values, strict=True)))
        return str(getattr(self._profile, f"{name}_message")(*values))


def fill(template: str, values: Mapping[str, str]) -> str:
    """``template`` with the values in place of their fields; a value without a field in the text stands at its end.

    So an agent has its data with any text, also one that a model wrote. Other braces stay as they are.
    """
    parts, missing = [template], []
    for name, value in values.items():
        field = f"{{{name}}}"
        if field not in template:
            missing.append(f"{_TITLES[name]}: {value}")
        # A value may itself contain a field: only the template's own parts are searched.
        parts = [piece for part in parts for piece in _split(part, field, value)]
    return "\n".join(["".join(parts), *missing])


class _Value(str):
    """A value that was filled in."""


def _split(part: str, field: str, value: str) -> list[str]:
    if isinstance(part, _Value) or field not in part:
        return [part]
    pieces = part.split(field)
    return [piece for text in pieces for piece in (text, _Value(value))][:-1]


def default_prompts(profile: ModuleType, names: Collection[str]) -> dict[str, str]:
    """The prompts ``names`` of a profile, with their fields."""
    return {name: getattr(profile, f"{name}_message")(*(f"{{{field}}}" for field in FIELDS[name])) for name in names}


def check_names(prompts: Mapping[str, str], names: Collection[str]) -> None:
    """Raise :class:`UnknownPromptError` for a prompt that is none of ``names``."""
    if unknown := sorted(prompts.keys() - set(names)):
        raise UnknownPromptError(f"prompts: the agent has no prompt {unknown[0]!r:.60}; it has {', '.join(names)}")
