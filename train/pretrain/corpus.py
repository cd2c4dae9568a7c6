"""The starter policy's pretraining data: an endless stream of generated dialogues.

Every item is one database with several dialogues about it, either of the LangGraph agent (it writes a query, checks
one, rewrites one) or of an agent that calls its query tool. Their text is that of the agents
(:mod:`groundwire.adapters.sql_agents.prompts`), and results are those of :mod:`groundwire.tools.sql`.

The lexicon's new subjects never have databases here, because validation has them. Their nouns appear, as names in
databases without meaning: a noun that the policy has never read is a noun that it cannot copy.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from groundwire.adapters.sql_agents import prompts
from groundwire.domains.spider.generate.databases import Database, fill, make_database, schema_text
from groundwire.domains.spider.generate.lexicon import FAMILIAR_SUBJECTS
from groundwire.domains.spider.generate.questions import MIX, GeneratedQuestion, write_question
from groundwire.tools.sql import DatabaseError, QueryError, render, run_query
from groundwire.train.local.packing import Branch
from groundwire.train.pretrain.tokenizer import IM_END, IM_START

__all__ = ["Dialogues", "Segment", "Stage", "dialogues", "encode", "prompt"]

_RESULT_CHARS = 72


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the curriculum: the size of its databases and the kinds of its dialogues."""

    n_tables: tuple[int, ...] = (2, 2, 3, 3, 4)
    n_attributes: tuple[int, ...] = (2, 3, 3, 4)
    invented: float = 0.9
    """Share of databases with arbitrary names, and of attributes that do not suit their entity."""
    freedom: float = 0.3
    """Variety of the questions' phrasing; reinforcement learning has 1."""
    mix: Mapping[str, float] = field(default_factory=lambda: MIX)
    writes: int = 6
    checks: int = 0
    rewrites: int = 0
    tools: float = 0.0
    """Share of databases whose dialogues are those of an agent that calls its query tool."""


Segment = tuple[str, bool]
"""Text of the chat template, and whether it is a reply to learn."""


@dataclass(frozen=True)
class Dialogues:
    """The chat template's text of a system message, and the dialogues that follow it."""

    prefix: str
    dialogues: list[list[Segment]]

    def texts(self) -> list[str]:
        """The prefix and all segments, in order."""
        return [self.prefix, *(text for dialogue in self.dialogues for text, _ in dialogue)]


def dialogues(rng: random.Random, stage: Stage) -> Iterator[Dialogues]:
    """The endless dialogues of one stage."""
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count():
            path = Path(folder) / f"{number}.sqlite"
            database = make_database(
                rng,
                rng.choice(FAMILIAR_SUBJECTS),
                invented=stage.invented,
                n_tables=stage.n_tables,
                n_attributes=stage.n_attributes,
            )
            if stage.checks or stage.rewrites:
                fill(database, str(path)).close()
            make = _tool_dialogues if rng.random() < stage.tools else _graph_dialogues
            yield make(rng, stage, database, str(path))
            path.unlink(missing_ok=True)


def prompt(schema: str, user: str) -> tuple[str, str]:
    """The chat template's text of one turn, as the system message's prefix and the rest."""
    return _system_turn(prompts.system_message(schema)), _user_turn(user)


def encode(tokenizer: PreTrainedTokenizerFast, items: list[Dialogues]) -> list[tuple[list[int], list[Branch]]]:
    """Sequences for :func:`groundwire.train.local.packing.pack`: replies are targets, the other text is context."""
    ids = iter(tokenizer([text for item in items for text in item.texts()])["input_ids"])
    sequences: list[tuple[list[int], list[Branch]]] = []
    for item in items:
        prefix = next(ids)
        branches: list[Branch] = []
        for dialogue in item.dialogues:
            segments = [(next(ids), is_reply) for _, is_reply in dialogue]
            mask = [int(is_reply) for tokens, is_reply in segments for _ in tokens]
            branches.append(([token for tokens, _ in segments for token in tokens], mask))
        sequences.append((prefix, branches))
    return sequences


def _graph_dialogues(rng: random.Random, stage: Stage, database: Database, path: str) -> Dialogues:
    """Dialogues of one turn each, as the nodes of the LangGraph agent have them."""
    turns = []
    for _ in range(stage.writes):
        question = _question(rng, stage, database)
        turns.append((prompts.write_message(question.text), prompts.fence(question.sql)))
    for _ in range(stage.checks):
        question = _question(rng, stage, database)
        # More wrong queries than right ones: an unsure policy then rejects, and learns from the rewrite.
        sql = question.sql if rng.random() < 0.3 else _corrupt(rng, database, question.sql)
        verdict = prompts.CORRECT if sql == question.sql else prompts.INCORRECT
        turns.append((prompts.check_message(question.text, sql, _result(path, sql)), verdict))
    for _ in range(stage.rewrites):
        question = _question(rng, stage, database)
        sql = _corrupt(rng, database, question.sql)
        message = prompts.rewrite_message(question.text, sql, _result(path, sql), prompts.INCORRECT)
        turns.append((message, prompts.fence(question.sql)))
    prefix = _system_turn(prompts.system_message(schema_text(database)))
    return Dialogues(prefix, [[(_user_turn(user), False), (reply + IM_END, True)] for user, reply in turns])


def _tool_dialogues(rng: random.Random, stage: Stage, database: Database, path: str) -> Dialogues:
    """``writes`` dialogues with a first tool call, and ``checks + rewrites`` that go on after a query's rows."""
    system = f"{prompts.tool_system_message(schema_text(database))}\nTools:\n{json.dumps(prompts.QUERY_TOOL)}\n"
    system += 'Call a tool as <tool_call>\n{"name": name, "arguments": {}}\n</tool_call>'

    def tool_turn(sql: str) -> Segment:
        return "\n" + _user_turn(f"<tool_response>\n{_result(path, sql)}\n</tool_response>"), False

    items: list[list[Segment]] = []
    for number in range(stage.writes + stage.checks + stage.rewrites):
        question = _question(rng, stage, database)
        start, call = (_user_turn(prompts.write_message(question.text)), False), _tool_call(question.sql)
        done = (prompts.DONE + IM_END, True)
        if number < stage.writes:
            items.append([start, (call, True)])
        elif rng.random() < 0.25:
            items.append([start, (call, False), tool_turn(question.sql), done])
        else:  # as with checks, most first queries are wrong; half of the corrupted ones fail
            wrong = _corrupt(rng, database, question.sql)
            correction: list[Segment] = [tool_turn(wrong), (call, True), tool_turn(question.sql), done]
            items.append([start, (_tool_call(wrong), False), *correction])
    return Dialogues(_system_turn(system), items)


def _question(rng: random.Random, stage: Stage, database: Database) -> GeneratedQuestion:
    return write_question(rng, database, freedom=stage.freedom, mix=stage.mix)


def _system_turn(text: str) -> str:
    return f"{IM_START}system\n{text}{IM_END}\n"


def _user_turn(text: str) -> str:
    return f"{IM_START}user\n{text}{IM_END}\n{IM_START}assistant\n"


def _tool_call(sql: str) -> str:
    call = json.dumps({"name": prompts.QUERY_TOOL["name"], "arguments": {"sql": sql}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>{IM_END}"


def _result(path: str, sql: str) -> str:
    """The output of the agent's execute node."""
    try:
        return render(run_query(path, sql, max_rows=100), max_chars=_RESULT_CHARS)
    except (QueryError, DatabaseError) as error:
        return f"Error: {error}"[:_RESULT_CHARS]


_SWAPS = {"avg": "max", "max": "min", "min": "sum", "sum": "avg", "DESC": "ASC", "ASC": "DESC", ">": "<", "<": ">"}
_SWAPS |= {"AND": "OR", "OR": "AND", ">=": ">", "<=": "<"}


def _corrupt(rng: random.Random, database: Database, sql: str) -> str:
    """A wrong query that resembles ``sql``: with another name or operator, or without a clause."""
    tables = [table.name for table in database.tables]
    columns = sorted({column.name for table in database.tables for column in table.columns})
    tokens = re.findall(r"'[^']*'|\w+|[<>=!]+|\s+|.", sql)
    for _ in range(8):
        changed = list(tokens)
        kind = rng.randrange(4)
        if kind == 0:
            _replace_one(rng, changed, columns, [*columns, "name", "title", "age"])
        elif kind == 1:
            _replace_one(rng, changed, tables, [*tables, tables[0] + "s"])
        elif kind == 2:
            changed = list(re.sub(r" (WHERE|LIMIT|ORDER BY|GROUP BY|AND|EXCEPT) .*", "", sql))
        else:
            changed = [_SWAPS.get(token, token) for token in tokens]
        if "".join(changed) != sql:
            return "".join(changed)
    return f"SELECT {rng.choice(columns)} FROM {tables[-1]} LIMIT 2"  # noqa: S608


def _replace_one(rng: random.Random, tokens: list[str], old: list[str], new: list[str]) -> None:
    places = [i for i, token in enumerate(tokens) if token in old]
    if places:
        tokens[rng.choice(places)] = rng.choice(new)
