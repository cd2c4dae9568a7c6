"""The starter policy's pretraining data: an endless stream of generated dialogues.

Most items are one database with several dialogues about it. A half of them are of our own agents: the LangGraph agent
(it writes a query, checks one, rewrites one) or the agent that calls its query tool, in their own text
(:mod:`groundwire.adapters.sql_agents.prompts`), with results of :mod:`groundwire.tools.sql`. The others are of agents
as other people may write them (:mod:`dev.pretrain.other_agents`). Other items are exercises in copying
(:mod:`dev.pretrain.drills`).

The lexicon's new subjects never have databases here, because validation has them. Their nouns appear, as names in
databases without meaning: a noun that the policy has never read is a noun that it cannot copy.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from dev.pretrain.drills import drills
from dev.pretrain.other_agents import Asked, other_dialogues
from dev.pretrain.turns import Dialogues, Segment, reply, system_turn, tool_call, tool_turn, user_turn
from dev.pretrain.wrong_queries import corrupt, first_query
from dev.spider_data.databases import Database, fill, make_database, schema_text
from dev.spider_data.lexicon import FAMILIAR_SUBJECTS
from dev.spider_data.questions import MIX, GeneratedQuestion, write_question
from groundwire.adapters.sql_agents import prompts
from groundwire.tools.sql import DatabaseError, QueryError, render, run_query
from groundwire.train.local.packing import Row

__all__ = ["Stage", "dialogues", "encode", "prompt", "query_result"]

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
    """Share of our own dialogues that are those of an agent that calls its query tool."""
    others: float = 0.0
    """Share of databases whose dialogues are those of other people's agents."""
    drills: float = 0.0
    """Share of items that are exercises in copying, without a database."""


def dialogues(rng: random.Random, stage: Stage) -> Iterator[Dialogues]:
    """The endless dialogues of one stage."""
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count():
            if rng.random() < stage.drills:
                yield drills(rng, stage.writes)
                continue
            path = Path(folder) / f"{number}.sqlite"
            database = make_database(
                rng,
                rng.choice(FAMILIAR_SUBJECTS),
                invented=stage.invented,
                n_tables=stage.n_tables,
                n_attributes=stage.n_attributes,
            )
            if rng.random() < stage.others:
                yield other_dialogues(rng, _asked(rng, stage, database))
                continue
            if stage.checks or stage.rewrites:
                fill(database, str(path)).close()
            make = _tool_dialogues if rng.random() < stage.tools else _graph_dialogues
            yield make(rng, stage, database, str(path))
            path.unlink(missing_ok=True)


def prompt(schema: str, user: str) -> tuple[str, str]:
    """The chat template's text of one turn, as the system message's prefix and the rest."""
    return system_turn(prompts.write("system", schema)), user_turn(user)


class _Tokens(NamedTuple):
    """A dialogue after its prompt; the mask is 1 for tokens of replies."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]


def encode(tokenizer: PreTrainedTokenizerFast, items: list[Dialogues]) -> list[Row]:
    """Rows for :func:`groundwire.train.local.packing.pack`: replies are targets, the rest is context."""
    ids = iter(tokenizer([text for item in items for text in item.texts()])["input_ids"])
    rows: list[Row] = []
    for item in items:
        row = Row(next(ids), [])
        for dialogue in item.dialogues:
            segments = [(next(ids), is_reply) for _, is_reply in dialogue]
            mask = [int(is_reply) for tokens, is_reply in segments for _ in tokens]
            tokens = [token for segment, _ in segments for token in segment]
            row.items.append(_Tokens(row.prefix, tokens, mask))
        rows.append(row)
    return rows


def _asked(rng: random.Random, stage: Stage, database: Database) -> Asked:
    questions = [_question(rng, stage, database) for _ in range(stage.writes + stage.rewrites)]
    return Asked(database, questions[: stage.writes], questions[stage.writes :])


def _graph_dialogues(rng: random.Random, stage: Stage, database: Database, path: str) -> Dialogues:
    """Dialogues of one turn each, as the nodes of the LangGraph agent have them."""
    turns = []
    for _ in range(stage.writes):
        question = _question(rng, stage, database)
        turns.append((prompts.write("write", question.text), prompts.fence(question.sql)))
    for _ in range(stage.checks):
        question = _question(rng, stage, database)
        sql = first_query(rng, database, question.sql)
        verdict = prompts.CORRECT if sql == question.sql else prompts.INCORRECT
        turns.append((prompts.write("check", question.text, sql, query_result(path, sql)), verdict))
    for _ in range(stage.rewrites):
        question = _question(rng, stage, database)
        sql = corrupt(rng, database, question.sql)
        message = prompts.write("rewrite", question.text, sql, query_result(path, sql), prompts.INCORRECT)
        turns.append((message, prompts.fence(question.sql)))
    prefix = system_turn(prompts.write("system", schema_text(database)))
    return Dialogues(prefix, [[(user_turn(user), False), reply(text)] for user, text in turns])


def _tool_dialogues(rng: random.Random, stage: Stage, database: Database, path: str) -> Dialogues:
    """``writes`` dialogues with a first tool call, and ``rewrites`` that go on after a query's rows."""

    def call(sql: str, *, learned: bool = True) -> Segment:
        return tool_call(prompts.QUERY_TOOL["name"], {"sql": sql}, learned=learned)

    items: list[list[Segment]] = []
    for number in range(stage.writes + stage.rewrites):
        question = _question(rng, stage, database)
        start = (user_turn(prompts.write("write", question.text)), False)
        if number < stage.writes:
            items.append([start, call(question.sql)])
            continue
        first = first_query(rng, database, question.sql)
        item = [start, call(first, learned=False), tool_turn(query_result(path, first))]
        if first != question.sql:
            item += [call(question.sql), tool_turn(query_result(path, question.sql))]
        items.append([*item, reply(prompts.DONE)])
    return Dialogues(system_turn(prompts.write("tool_system", schema_text(database)), [prompts.QUERY_TOOL]), items)


def _question(rng: random.Random, stage: Stage, database: Database) -> GeneratedQuestion:
    return write_question(rng, database, freedom=stage.freedom, mix=stage.mix)


def query_result(path: str, sql: str) -> str:
    """The output of the agent's execute node."""
    try:
        return render(run_query(path, sql, max_rows=100), max_chars=_RESULT_CHARS)
    except (QueryError, DatabaseError) as error:
        return f"Error: {error}"[:_RESULT_CHARS]
