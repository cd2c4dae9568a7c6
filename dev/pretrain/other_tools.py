"""The tools of other people's agents: definitions as their frameworks send them, and what the tools return."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dev.pretrain.wording import HELD_OUT, WORDING, argument_name, choose, phrase, random_words, tool_name

__all__ = ["Definition", "Run", "Style", "final_tool", "handoff", "other_tool", "query_tool", "rows_format"]

Definition = dict[str, Any]
Run = Callable[[str], str]
"""Runs a query and returns its result as text."""
_Argument = tuple[str, Any, str]
"""Name, type and description."""


@dataclass(frozen=True)
class Style:
    """How a framework writes the definitions of its tools; ``prefix`` begins the names of all tools of a kit."""

    prefix: str
    titles: bool
    strict: bool | None
    closed: bool
    described: bool
    order: tuple[str, ...]

    @classmethod
    def sample(cls, rng: random.Random) -> Style:
        """A style that a framework may have."""
        order = ["type", "properties", "required", "title", "additionalProperties", "$schema"]
        if rng.random() < 0.7:
            rng.shuffle(order)
        strict = rng.choice((None, None, True, True, False))
        titles, closed = rng.random() < 0.35, rng.random() < 0.5
        prefix = ""
        if rng.random() < 0.2:
            prefix = rng.choice(("sql", "db", "mcp", "data", "sqlite", "_".join(random_words(rng, 2)))) + "_"
        return cls(prefix, titles, strict, closed, rng.random() < 0.6, tuple(order))

    def define(
        self, rng: random.Random, name: str, description: str, arguments: Sequence[_Argument], required: int
    ) -> Definition:
        """The definition of a tool, of which the first ``required`` arguments are required."""
        if not name.startswith(self.prefix) and f"{self.prefix}{name}" not in HELD_OUT:
            name = f"{self.prefix}{name}"
        properties = {}
        for argument, kind, about in arguments:
            value = {"type": kind} if isinstance(kind, str) else dict(kind)
            if self.titles:
                value = {"title": argument.replace("_", " ").title(), **value}
            if self.described and about:
                value = {"description": about, **value} if self.titles else {**value, "description": about}
            properties[argument] = value
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if required or self.closed:
            parameters["required"] = [argument for argument, *_ in arguments[:required]]
        if self.titles and rng.random() < 0.6:
            parameters["title"] = f"{name}_args"
        if self.closed:
            parameters["additionalProperties"] = False
        parameters = {key: parameters[key] for key in self.order if key in parameters}
        definition: Definition = {"name": name, "description": description, "parameters": parameters}
        return definition if self.strict is None else {**definition, "strict": self.strict}


def query_tool(rng: random.Random, style: Style) -> tuple[Definition, str]:
    """A tool that runs queries, and the name of its argument for the query."""
    argument = argument_name(rng)
    arguments: list[_Argument] = [(argument, "string", phrase(rng, "argument_descriptions"))]
    if rng.random() < 0.25:
        for name, kind, about in rng.sample(WORDING["optional_arguments"], rng.choice((1, 1, 2))):
            arguments.append((name, kind, choose(rng, about)))
    name = tool_name(rng)
    return style.define(rng, name, phrase(rng, "run_descriptions"), arguments, 1), argument


def other_tool(rng: random.Random, style: Style, kind: str) -> Definition:
    """A tool of a ``kind`` of the wording: list_tools, schema_tools, all_schema_tools, check_tools, other_tools."""
    pattern, about, *rest = rng.choice(WORDING[kind])
    name, arguments, required = tool_name(rng, pattern), [], True
    if kind == "schema_tools":
        argument = argument_name(rng, "schema_arguments")
        several: Any = "string" if argument == "table" or rng.random() < 0.6 else None
        arguments = [(argument, several or {"type": "array", "items": {"type": "string"}}, "")]
    elif kind == "list_tools" and rng.random() < 0.2:  # some frameworks give every tool an argument
        empty = {"type": "string", "default": ""}
        arguments, required = [(argument_name(rng, "empty_arguments"), empty, "An empty string.")], False
    elif kind == "check_tools":
        arguments = [(argument_name(rng), "string", phrase(rng, "argument_descriptions"))]
    elif rest:
        arguments = [(argument, "string", "") for argument in rest[0]]
    return style.define(rng, name, choose(rng, about), arguments, len(arguments) if required else 0)


def final_tool(rng: random.Random, style: Style) -> tuple[Definition, str]:
    """A tool that takes the final answer, and the name of its argument."""
    pattern, about, _ = rng.choice(WORDING["final_tools"])
    argument = argument_name(rng, "final_arguments")
    described = phrase(rng, "argument_descriptions") if rng.random() < 0.5 else ""
    arguments = [(argument, "string", described)]
    return style.define(rng, tool_name(rng, pattern), choose(rng, about), arguments, 1), argument


def handoff(rng: random.Random, *, data: bool) -> tuple[Definition, str]:
    """A tool that hands the conversation to another agent, as the Agents SDK defines it, and that agent's name."""
    name = phrase(rng, "specialists" if data else "other_specialists")
    name = rng.choice((name, name.capitalize(), name.title()))
    about = phrase(rng, "handoff_descriptions" if data else "other_handoff_descriptions")
    tool = f"{rng.choice(('transfer_to', 'transfer_to', 'hand_over_to', 'delegate_to', 'ask'))}_{name}"
    description = choose(rng, f"[Handoff|Transfer|Hand over] to the {name} [agent|] to handle the request. {about}")
    parameters = {"additionalProperties": False, "type": "object", "properties": {}, "required": []}
    keys = rng.sample(sorted(parameters), 4)
    definition: Definition = {"name": tool.replace(" ", "_").lower(), "description": description.strip()}
    definition["parameters"] = {key: parameters[key] for key in keys}
    return {**definition, "strict": True}, name


def rows_format(rng: random.Random, connection: sqlite3.Connection) -> Run:
    """A random way in which a tool shows the rows of a query, or its error."""
    write = rng.choice((_tuples, _tuples, _lines, _lines, _records, _table))
    limit = rng.choice((72, 100, 150, 300))
    prefix = rng.choice(("Error: ", "Error: ", "error: ", "SQL error: ", "", "Query failed: ", "OperationalError: "))
    empty = rng.choice(("no rows", "[]", "(no rows)", "No results", "0 rows", "Empty result"))

    def run(sql: str) -> str:
        try:
            cursor = connection.execute(sql)
            rows = cursor.fetchmany(20)
        except sqlite3.Error as error:
            return f"{prefix}{error}"
        return write([column[0] for column in cursor.description], rows)[:limit] if rows else empty

    return run


def _tuples(columns: list[str], rows: list[Any]) -> str:
    return str(rows)


def _lines(columns: list[str], rows: list[Any]) -> str:
    return "\n".join(map(str, rows))


def _records(columns: list[str], rows: list[Any]) -> str:
    return json.dumps([dict(zip(columns, row, strict=True)) for row in rows], ensure_ascii=False)


def _table(columns: list[str], rows: list[Any]) -> str:
    return "\n".join(" | ".join(map(str, row)) for row in [columns, *rows])
