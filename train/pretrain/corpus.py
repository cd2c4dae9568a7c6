"""What the starter policy reads before reinforcement learning: an endless stream of generated dialogues.

Every item is one database with several dialogues about it: those of the LangGraph agent (writing a query, checking one,
rewriting one), or those of an agent that calls its query tool. The words are those of the agents
(``groundwire.adapters.sql_agents.prompts``) and the results are what ``groundwire.tools.sql`` answers, so nothing
changes when the agents take over. Databases about the lexicon's new subjects never appear; their nouns do, as names in
databases that make no sense, because a noun that was never read cannot be copied either.
"""

from __future__ import annotations

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
from groundwire.domains.spider.generate.questions import MIX, write_question
from groundwire.tools.sql import DatabaseError, QueryError, render, run_query
from groundwire.train.local.packing import Branch
from groundwire.train.pretrain.tokenizer import IM_END, IM_START

__all__ = ["Dialogues", "Segment", "Stage", "dialogues", "encode", "prompt", "shown_result"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the curriculum: how large its databases are, and what is asked about them."""

    n_tables: tuple[int, ...] = (2, 2, 3, 3, 4)
    n_attributes: tuple[int, ...] = (2, 3, 3, 4)
    invented: float = 0.9
    """Share of databases with names from anywhere, and of attributes that suit no entity."""
    freedom: float = 0.3
    """How freely questions are phrased; the tasks of reinforcement learning have 1."""
    mix: Mapping[str, float] = field(default_factory=lambda: MIX)
    writes: int = 6
    checks: int = 0
    rewrites: int = 0
    tools: float = 0.0
    """Share of databases whose dialogues are with an agent that calls its query tool."""
    result_chars: int = 72


Segment = tuple[str, bool]
"""Text of the chat template, and whether it is a reply to be learned."""


@dataclass(frozen=True)
class Dialogues:
    """The chat template's text of one system message, and the dialogues that follow it."""

    prefix: str
    dialogues: list[list[Segment]]

    def texts(self) -> list[str]:
        """The prefix and all segments, in order."""
        return [self.prefix, *(text for dialogue in self.dialogues for text, _ in dialogue)]


def dialogues(rng: random.Random, stage: Stage) -> Iterator[Dialogues]:
    """Endless dialogues of one stage."""
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        while True:
            number += 1
            database = make_database(
                rng,
                rng.choice(FAMILIAR_SUBJECTS),
                invented=stage.invented,
                n_tables=stage.n_tables,
                n_attributes=stage.n_attributes,
            )
            path = Path(folder) / f"{number}.sqlite"
            if stage.checks or stage.rewrites:
                fill(database, str(path)).close()
            yield _about(rng, stage, database, str(path))
            path.unlink(missing_ok=True)


def prompt(system: str, user: str) -> tuple[str, str]:
    """The chat template's text for one turn, cut behind the system message: the prefix, and what follows it."""
    return _prefix(prompts.system_message(system)), _asked(user)


def encode(tokenizer: PreTrainedTokenizerFast, items: list[Dialogues]) -> list[tuple[list[int], list[Branch]]]:
    """Sequences for :func:`groundwire.train.local.packing.pack`: replies are targets, everything before them is
    context.
    """
    ids = iter(tokenizer([text for item in items for text in item.texts()])["input_ids"])
    sequences: list[tuple[list[int], list[Branch]]] = []
    for item in items:
        prefix = next(ids)
        branches: list[Branch] = []
        for dialogue in item.dialogues:
            pieces = [(next(ids), learned) for _, learned in dialogue]
            mask = [int(learned) for piece, learned in pieces for _ in piece]
            branches.append(([token for piece, _ in pieces for token in piece], mask))
        sequences.append((prefix, branches))
    return sequences


def _prefix(system: str) -> str:
    return f"{IM_START}system\n{system}{IM_END}\n"


def _asked(user: str) -> str:
    return f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n"


def _about(rng: random.Random, stage: Stage, database: Database, path: str) -> Dialogues:
    if rng.random() < stage.tools:
        return _with_tools(rng, stage, database, path)

    def ask() -> tuple[str, str]:
        question = write_question(rng, database, freedom=stage.freedom, mix=stage.mix)
        return question.text, question.sql

    turns = []
    for _ in range(stage.writes):
        question, sql = ask()
        turns.append((prompts.write_message(question), prompts.fence(sql)))
    for _ in range(stage.checks):
        question, sql = ask()
        # More wrong than right: a policy that cannot tell yet rejects, and has the rewrite to learn from.
        shown = sql if rng.random() < 0.3 else spoil(rng, database, sql)
        verdict = prompts.CORRECT if shown == sql else prompts.INCORRECT
        message = prompts.check_message(question, shown, shown_result(path, shown, stage.result_chars))
        turns.append((message, verdict))
    for _ in range(stage.rewrites):
        question, sql = ask()
        shown = spoil(rng, database, sql)
        message = prompts.rewrite_message(
            question, shown, shown_result(path, shown, stage.result_chars), prompts.INCORRECT
        )
        turns.append((message, prompts.fence(sql)))
    prefix = _prefix(prompts.system_message(schema_text(database)))
    return Dialogues(prefix, [[(_asked(user), False), (reply + IM_END, True)] for user, reply in turns])


def _with_tools(rng: random.Random, stage: Stage, database: Database, path: str) -> Dialogues:
    """``writes`` first queries, each a tool call; ``checks`` + ``rewrites`` times, what follows on a query's rows."""
    system = f"{prompts.tool_system_message(schema_text(database))}\nTools:\n{json.dumps(prompts.QUERY_TOOL)}\n"
    system += 'Call a tool as <tool_call>\n{"name": name, "arguments": {}}\n</tool_call>'

    def told(sql: str) -> Segment:
        return _told(shown_result(path, sql, stage.result_chars)), False

    found = []
    for number in range(stage.writes + stage.checks + stage.rewrites):
        question = write_question(rng, database, freedom=stage.freedom, mix=stage.mix)
        asked, right = (_asked(prompts.write_message(question.text)), False), _call(question.sql)
        if number < stage.writes:
            found.append([asked, (right, True)])
        elif rng.random() < 0.25:
            found.append([asked, (right, False), told(question.sql), (prompts.DONE + IM_END, True)])
        else:
            # As with the checks, first rows are wrong more often than right; half of the spoiled queries fail.
            wrong = spoil(rng, database, question.sql)
            found.append([asked, (_call(wrong), False), told(wrong), (right, True), told(question.sql)])
            found[-1].append((prompts.DONE + IM_END, True))
    return Dialogues(_prefix(system), found)


def _call(sql: str) -> str:
    call = json.dumps({"name": prompts.QUERY_TOOL["name"], "arguments": {"sql": sql}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>{IM_END}"


def _told(result: str) -> str:
    return "\n" + _asked(f"<tool_response>\n{result}\n</tool_response>")


def shown_result(path: str, sql: str, max_chars: int) -> str:
    """What the agent's execute node would answer."""
    try:
        return render(run_query(path, sql, max_rows=100), max_chars=max_chars)
    except (QueryError, DatabaseError) as error:
        return f"Error: {error}"[:max_chars]


_SWAPS = {"avg": "max", "max": "min", "min": "sum", "sum": "avg", "DESC": "ASC", "ASC": "DESC", ">": "<", "<": ">"}
_SWAPS |= {"AND": "OR", "OR": "AND", ">=": ">", "<=": "<"}


def spoil(rng: random.Random, database: Database, sql: str) -> str:
    """A query near ``sql`` that is wrong: another name, another operator, or a clause less."""
    tables = [table.name for table in database.tables]
    columns = sorted({column.name for table in database.tables for column in table.columns})
    tokens = re.findall(r"'[^']*'|\w+|[<>=!]+|\s+|.", sql)
    for _ in range(8):
        changed = list(tokens)
        way = rng.randrange(4)
        if way == 0:
            _replace(rng, changed, columns, [*columns, "name", "title", "age"])
        elif way == 1:
            _replace(rng, changed, tables, [*tables, tables[0] + "s"])
        elif way == 2:
            changed = list(re.sub(r" (WHERE|LIMIT|ORDER BY|GROUP BY|AND|EXCEPT) .*", "", sql))
        else:
            changed = [_SWAPS.get(token, token) for token in tokens]
        if "".join(changed) != sql:
            return "".join(changed)
    return f"SELECT {rng.choice(columns)} FROM {tables[-1]} LIMIT 2"  # noqa: S608


def _replace(rng: random.Random, tokens: list[str], old: list[str], new: list[str]) -> None:
    places = [i for i, token in enumerate(tokens) if token in old]
    if places:
        tokens[rng.choice(places)] = rng.choice(new)
