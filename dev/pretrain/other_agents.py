"""Dialogues of other people's agents: any prompt wording, any tools, several ways to answer.

Four kinds of agents: one that asks for a query at once, one that runs queries with a tool, one that first has to read
the schema with tools, and one that hands the question to another agent.
"""

from __future__ import annotations

import json
import random
import sqlite3
from dataclasses import dataclass
from typing import Any

from dev.pretrain.other_tools import (
    Definition,
    Style,
    final_tool,
    handoff,
    other_tool,
    query_tool,
    rows_format,
)
from dev.pretrain.schema_formats import format_schema, schema_formats
from dev.pretrain.turns import (
    Dialogues,
    Segment,
    reply,
    system_turn,
    tool_call,
    tool_turn,
    user_start,
    user_turn,
)
from dev.pretrain.wording import argument_name, paragraph, phrase
from dev.pretrain.wrong_queries import corrupt, first_query
from dev.spider_data.databases import Database, fill
from dev.spider_data.questions import GeneratedQuestion
from groundwire.adapters.sql_agents.prompts import DONE, fence

__all__ = ["Asked", "other_dialogues"]


@dataclass(frozen=True)
class Asked:
    """What the dialogues of one database are about: questions for first queries, and for turns after a query."""

    database: Database
    writes: list[GeneratedQuestion]
    later: list[GeneratedQuestion]


def other_dialogues(rng: random.Random, asked: Asked) -> Dialogues:
    """Dialogues of one agent."""
    connection = fill(asked.database)
    try:
        make = rng.choices((_plain, _tools, _explore, _triage), (25, 30, 40, 5))[0]
        return make(rng, asked, connection)
    finally:
        connection.close()


@dataclass(frozen=True)
class _Answer:
    """How an agent gives its last reply: ``instruction`` in the prompt, and what it writes."""

    form: str
    instruction: str
    key: str = ""
    final: str = ""

    @classmethod
    def sample(cls, rng: random.Random, forms: dict[str, int], final: str = "") -> _Answer:
        form = rng.choices(list(forms), list(forms.values()))[0]
        instruction, key = phrase(rng, f"style_{form}", final=final), ""
        if form == "json":
            key = argument_name(rng)
            instruction = f"{instruction} {_name_field(rng, key)}" if rng.random() < 0.5 else instruction
        elif form == "tool":
            key = argument_name(rng, "final_arguments")
        return cls(form, "" if rng.random() < 0.15 and form != "bare" else instruction, key, final)

    def segment(self, sql: str) -> Segment:
        """The last reply."""
        if self.form == "fenced":
            return reply(fence(sql))
        if self.form == "json":
            fields = {self.key: sql}
            return reply(json.dumps(fields, ensure_ascii=False))
        if self.form == "tool":
            return tool_call(self.final, {self.key: sql})
        if self.form == "last":
            return reply(DONE)
        return reply(sql if self.form == "bare" else "The result answers the question.")


def _name_field(rng: random.Random, key: str) -> str:
    """A sentence that names the field of the query."""
    sentences = (f'The query is in "{key}".', f'Put the query into "{key}".', f"Field: {key}.", f'{{"{key}": ...}}')
    return rng.choice(sentences)


def _n_noise(rng: random.Random) -> int:
    return rng.choice((0, 0, 0, 1, 1, 2, 3, 4, 6, 10)) if rng.random() < 0.94 else rng.randint(15, 90)


def _ask(rng: random.Random, question: str, *sentences: str, spare: float = 0.75) -> str:
    """A user's message with the question and, rarely, further text."""
    text = phrase(rng, "questions", q=question)
    if rng.random() < 1 - spare:
        text += "\n" + phrase(rng, "question_tails")
    if rng.random() < 0.06:
        text += rng.choice("\n ") + paragraph(rng, [], rng.choice((1, 2))).strip()
    return "\n".join([text, *filter(None, sentences)])


def _with_schema(rng: random.Random, schema: str) -> str:
    intro = phrase(rng, "schema_intro")
    end = {"<schema>": "</schema>", "```": "```"}.get(intro, "")
    return "\n".join(filter(None, [intro, schema, end]))


def _instructions(rng: random.Random, sentences: list[str]) -> str:
    """The author's instructions: a role, ``sentences``, rules and noise."""
    rules = [phrase(rng, "rules") for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    parts = [*sentences, *rules]
    rng.shuffle(parts)
    role = [phrase(rng, "roles")] if rng.random() < 0.8 else []
    return paragraph(rng, role + parts, _n_noise(rng))


def _prompt(rng: random.Random, instructions: str, schema: str, tools: list[Definition]) -> tuple[str, bool]:
    """The beginning of all dialogues, and whether it is inside the user's message."""
    shown = _with_schema(rng, schema) if schema else ""
    chance = rng.random()
    if not schema or chance < 0.7:
        parts = [instructions, shown] if rng.random() < 0.85 else [shown, instructions]
        return system_turn(rng.choice(("\n\n", "\n")).join(filter(None, parts)), tools), False
    if chance < 0.9:
        return system_turn(instructions, tools) + f"{user_start()}{shown}\n", True
    return system_turn("", tools) + f"{user_start()}{instructions}\n{shown}\n", True


def _plain(rng: random.Random, asked: Asked, connection: sqlite3.Connection) -> Dialogues:
    """An agent that asks for a query, and for a better one if it fails."""
    answer = _Answer.sample(rng, {"fenced": 55, "bare": 20, "json": 25})
    sentences = [phrase(rng, "tasks")]
    in_user = rng.random() < 0.35
    schema = format_schema(rng, asked.database, connection)
    sentences.append("" if in_user else answer.instruction)
    prefix, open_turn = _prompt(rng, _instructions(rng, sentences), schema, [])
    run = rows_format(rng, connection)

    def first(text: str) -> Segment:
        return (user_turn(text).removeprefix(user_start()) if open_turn else user_turn(text)), False

    items = []
    last = answer.instruction if in_user else ""
    for question in asked.writes:
        items.append([first(_ask(rng, question.text, last)), answer.segment(question.sql)])
    for question in asked.later:
        wrong = corrupt(rng, asked.database, question.sql)
        shown = fence(wrong) if rng.random() < 0.7 else wrong
        text = f"{phrase(rng, 'failed')}\n{shown}\n{phrase(rng, 'error_intro')}{run(wrong)}"
        text = f"{_ask(rng, question.text, spare=1.0)}\n{text}\n{phrase(rng, 'repair')}"
        items.append([first(f"{text}\n{last}".strip()), answer.segment(question.sql)])
    return Dialogues(prefix, items)


def _handed(rng: random.Random, question: str) -> tuple[str, list[Segment]]:
    """The user's message and, sometimes, a handoff to this agent before its first reply."""
    if rng.random() > 0.15:
        return question, []
    definition, name = handoff(rng, data=True)
    shown = rng.choice((json.dumps({"assistant": name}), f"Transferred to {name}.", f"{name} is now active."))
    return question, [tool_call(definition["name"], {}, learned=False), tool_turn(shown)]


def _toolbox(rng: random.Random, style: Style, tools: list[Definition], kinds: tuple[str, ...]) -> list[Definition]:
    """``tools`` and random other ones, in random order."""
    count = rng.choice((0, 0, 0, 1, 1, 2, 3)) if rng.random() < 0.95 else rng.randint(4, 10)
    tools = tools + [other_tool(rng, style, rng.choice(kinds)) for _ in range(count)]
    rng.shuffle(tools)
    return tools


def _tools(rng: random.Random, asked: Asked, connection: sqlite3.Connection) -> Dialogues:
    """An agent that runs its queries with one of its tools; some have only a tool for the answer."""
    style = Style.sample(rng)
    if rng.random() < 0.12:
        return _typed(rng, asked, connection, style)
    tool, argument = query_tool(rng, style)
    name, tools = tool["name"], [tool]
    final, key = final_tool(rng, style)
    answer = _Answer.sample(rng, {"fenced": 35, "prose": 25, "last": 15, "json": 15, "tool": 20}, final["name"])
    if answer.form == "tool":
        answer = _Answer("tool", answer.instruction, key, final["name"])
        tools.append(final)
    kinds = ("other_tools", "other_tools", "list_tools", "schema_tools", "check_tools")
    tools = _toolbox(rng, style, tools, kinds)
    sentences = [phrase(rng, "tasks") if rng.random() < 0.4 else "", phrase(rng, "use_tool", tool=name)]
    instructions = _instructions(rng, [*sentences, answer.instruction])
    prefix, open_turn = _prompt(rng, instructions, format_schema(rng, asked.database, connection), tools)
    run = rows_format(rng, connection)

    def start(question: str) -> list[Segment]:
        text = user_turn(_ask(rng, question))
        if open_turn:
            return [(text.removeprefix(user_start()), False)]
        _, handed = _handed(rng, question)
        return [(text, False), *handed]

    def call(sql: str, *, learned: bool = True) -> Segment:
        return tool_call(name, {argument: sql}, learned=learned)

    items = [[*start(question.text), call(question.sql)] for question in asked.writes]
    for question in asked.later:
        first = first_query(rng, asked.database, question.sql)
        item = [*start(question.text), call(first, learned=False), tool_turn(run(first))]
        if first != question.sql:
            item += [call(question.sql), tool_turn(run(question.sql))]
        items.append([*item, answer.segment(question.sql)])
    return Dialogues(prefix, items)


def _typed(rng: random.Random, asked: Asked, connection: sqlite3.Connection, style: Style) -> Dialogues:
    """An agent whose only tool takes its answer, a query."""
    tool, argument = final_tool(rng, style)
    if rng.random() < 0.5:
        argument = argument_name(rng)
        about = phrase(rng, "argument_descriptions")
        tool = style.define(rng, tool["name"], tool["description"], [(argument, "string", about)], 1)
    sentences = [phrase(rng, "tasks"), phrase(rng, "style_tool", final=tool["name"]) if rng.random() < 0.5 else ""]
    schema = format_schema(rng, asked.database, connection)
    prefix, open_turn = _prompt(rng, _instructions(rng, sentences), schema, [tool])
    items: list[list[Segment]] = []
    for question in [*asked.writes, *asked.later]:
        text = user_turn(_ask(rng, question.text))
        text = text.removeprefix(user_start()) if open_turn else text
        items.append([(text, False), tool_call(tool["name"], {argument: question.sql})])
    return Dialogues(prefix, items)


def _explore(rng: random.Random, asked: Asked, connection: sqlite3.Connection) -> Dialogues:
    """An agent that reads the names and the schema of the tables with its tools."""
    style = Style.sample(rng)
    tool, argument = query_tool(rng, style)
    lister = other_tool(rng, style, "list_tools") if rng.random() < 0.8 else None
    describer = other_tool(rng, style, "schema_tools" if lister or rng.random() < 0.5 else "all_schema_tools")
    tools = [tool, *([lister] if lister else []), describer]
    if rng.random() < 0.3:
        tools.append(other_tool(rng, style, "check_tools"))
    tools = _toolbox(rng, style, tools, ("other_tools",)) if rng.random() < 0.5 else rng.sample(tools, len(tools))
    answer = _Answer.sample(rng, {"fenced": 30, "prose": 50, "last": 20})
    hint = phrase(rng, "explore", list=lister["name"] if lister else "a tool", schema=describer["name"])
    sentences = [hint, phrase(rng, "use_tool", tool=tool["name"]), answer.instruction]
    names = [table.name for table in asked.database.tables]
    shown = "" if lister or not _properties(describer) else f"Tables: {', '.join(names)}"
    prefix = system_turn("\n".join(filter(None, [_instructions(rng, sentences), shown])), tools)
    run = rows_format(rng, connection)
    explored = _exploration(rng, asked.database, connection, lister, describer)
    items: list[list[Segment]] = []
    for number, question in enumerate([*asked.writes[:2], *asked.later[:1]]):
        start = (user_turn(_ask(rng, question.text)), False)
        item = [start, *explored, tool_call(tool["name"], {argument: question.sql})]
        if number >= 2:
            item += [tool_turn(run(question.sql)), answer.segment(question.sql)]
        items.append(item)
    return Dialogues(prefix, items)


def _exploration(
    rng: random.Random,
    database: Database,
    connection: sqlite3.Connection,
    lister: Definition | None,
    describer: Definition,
) -> list[Segment]:
    """The calls that read the schema, with their results."""
    names = [table.name for table in database.tables]
    segments: list[Segment] = []
    if lister:
        listed = rng.choice((", ".join(names), json.dumps(names), "\n".join(names), str(names)))
        segments += [tool_call(lister["name"], {}), tool_turn(listed)]
    describe = schema_formats(rng, database, connection)
    properties = _properties(describer)
    if not properties:
        return [*segments, tool_call(describer["name"], {}), tool_turn(describe(database.tables))]
    ((argument, schema),) = properties.items()
    if argument == "table":
        calls: list[Any] = names
    else:
        calls = [names] if schema["type"] == "array" else [", ".join(names)]
    for value in calls:
        shown = describe([database.table(value)] if argument == "table" else database.tables)
        segments += [tool_call(describer["name"], {argument: value}), tool_turn(shown)]
    return segments


def _properties(tool: Definition) -> dict[str, Any]:
    """The arguments of a tool."""
    properties: dict[str, Any] = tool["parameters"]["properties"]
    return properties


def _triage(rng: random.Random, asked: Asked, connection: sqlite3.Connection) -> Dialogues:
    """An agent that hands every question about data to another one."""
    definition, name = handoff(rng, data=True)
    others = [handoff(rng, data=False)[0] for _ in range(rng.choice((0, 0, 1, 2)))]
    tools = [definition, *others]
    rng.shuffle(tools)
    hint = f"Questions about the data go to the {name}." if rng.random() < 0.3 else ""
    prefix = system_turn(_instructions(rng, [phrase(rng, "triage"), hint]), tools)
    items = [
        [(user_turn(_ask(rng, question.text)), False), tool_call(definition["name"], {})]
        for question in [*asked.writes, *asked.later]
    ]
    return Dialogues(prefix, items)
