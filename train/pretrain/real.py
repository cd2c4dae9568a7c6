"""Dialogues about real databases, from the training questions of a folder like Spider's, for a larger starter.

A few thousand questions about a hundred databases are learned by heart long before they are understood. So what does
not matter is changed from one dialogue to the next: names that question and query share (the same word for the same
word, in schema, question, query and result), the order of tables and columns, and what else there is beside those that
are asked about.
"""

from __future__ import annotations

import itertools
import random
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from groundwire.adapters.sql_agents import prompts
from groundwire.domains import Task
from groundwire.domains.spider.generate.databases import Database, Link, fill, make_database
from groundwire.domains.spider.generate.lexicon import FAMILIAR_SUBJECTS
from groundwire.domains.spider.generate.phrasing import plural
from groundwire.domains.spider.generate.questions import write_question
from groundwire.train.pretrain.corpus import Dialogues, Segment, Stage, prompt, shown_result
from groundwire.train.pretrain.plain import plain_question
from groundwire.train.pretrain.renaming import KEPT, WORD, Renaming
from groundwire.train.pretrain.schemas import create_table, schema_of, tables_of
from groundwire.train.pretrain.tokenizer import IM_END

__all__ = ["RESULT_CHARS", "made_up_dialogues", "real_dialogues"]

RESULT_CHARS = 256
"""Characters of a result that the dialogues show: enough for the names that an error lists (``execution_truncate``)."""
_TURNS = (*("write",) * 4, "check", *("rewrite",) * 4)
_OTHERS, _RIGHT = 0.2, 0.4
"""Of the queries that are shown: the share that belongs to another question; and of those checked, that is right."""
_ONCE = 0.7
"""Of the queries nearly right: the share with one wrong name."""
_UNASKED = 0.3
"""Of the rewrites after an error: the share whose question is another one, so that only the error says what to mend."""
_PLAIN = 0.4
"""Share of the turns about :func:`groundwire.train.pretrain.plain.plain_question` instead of a task."""
_RENAMED = 0.8
"""Share of the dialogues with other names."""
_PLURAL_TABLES, _SPELLINGS = 0.4, (4, 3, 2, 1)
"""Of generated databases: the share with tables in the plural; weights of ``ab_cd``, ``Ab_Cd``, ``AbCd``, ``AB_CD``."""


def real_dialogues(rng: random.Random, tasks: Sequence[Task], pool: Sequence[str]) -> Iterator[Dialogues]:
    """Endless dialogues about the databases of ``tasks``: queries are written, checked and rewritten.

    ``pool`` has the words that other names are made of.
    """
    by_path: dict[str, list[Task]] = {}
    for task in tasks:
        by_path.setdefault(str(task["db_path"]), []).append(task)
    paths = sorted(by_path)
    weights = [len(by_path[path]) for path in paths]
    while True:
        path = rng.choices(paths, weights)[0]
        yield _about(rng, by_path[path], schema_of(rng.choice(paths)), pool, _TURNS)


def made_up_dialogues(rng: random.Random, stage: Stage, pool: Sequence[str]) -> Iterator[Dialogues]:
    """The same about generated databases of ``stage``: there is no end of them, so nothing can be learned by heart.

    Their questions are plainer; what they teach is to copy whatever names there are.
    """
    turns = ("write",) * stage.writes + ("check",) * stage.checks + ("rewrite",) * stage.rewrites
    other = ""
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count():
            database = make_database(
                rng, rng.choice(FAMILIAR_SUBJECTS), n_tables=stage.n_tables, n_attributes=stage.n_attributes
            )
            asked = [write_question(rng, database, freedom=stage.freedom, mix=stage.mix) for _ in turns]
            path, spelled = Path(folder) / f"{number}.sqlite", _spelled(rng, database)
            for table in database.tables:
                table.name = spelled(table.name)
                table.columns = [replace(column, name=spelled(column.name)) for column in table.columns]
            database.links = [Link(*map(spelled, (link.child, link.column, link.parent))) for link in database.links]
            with closing(fill(database)) as made, closing(sqlite3.connect(path)) as file:
                file.execute("PRAGMA journal_mode = OFF")  # it lives for milliseconds, and there are thousands
                made.backup(file)
            tasks = [{"question": each.text, "query": spelled(each.sql), "db_path": str(path)} for each in asked]
            yield _about(rng, tasks, other, pool, turns)
            other = schema_of(str(path))
            path.unlink()


def _spelled(rng: random.Random, database: Database) -> Callable[[str], str]:
    """Writes the database's names in SQL as another author would: tables in the plural, words joined otherwise."""
    columns = {column.name for table in database.tables for column in table.columns}
    tables = {table.name for table in database.tables} - columns
    many = rng.random() < _PLURAL_TABLES
    join = rng.choices((str, str.title, lambda name: name.title().replace("_", ""), str.upper), _SPELLINGS)[0]

    def put(found: re.Match[str]) -> str:
        name = found[0]
        if name in tables and many:
            name = plural(name).replace(" ", "_")
        return join(name) if found[0] in tables | columns else name

    return lambda sql: re.sub(r"'[^']*'|\w+", put, sql)


def _about(
    rng: random.Random, tasks: Sequence[Task], strange: str, pool: Sequence[str], turns: Sequence[str]
) -> Dialogues:
    """Dialogues about the one database of ``tasks``, which may get tables of the schema ``strange``."""
    path = str(tasks[0]["db_path"])
    chosen = rng.sample(tasks, min(len(turns), len(tasks)))
    others = [str(rng.choice(tasks)["query"]) for _ in chosen]
    own, schema = _rearranged(rng, schema_of(path), strange, [*(str(task["query"]) for task in chosen), *others])
    new = Renaming(rng, schema, pool, chosen) if rng.random() < _RENAMED else Renaming(rng, "", (), ())
    system, found = new.sql(schema), list[list[Segment]]()
    prefix = ""
    for turn, task, other in zip(turns, chosen, others, strict=False):
        asked, gold = str(task["question"]), str(task["query"])
        if rng.random() < _PLAIN and (made := plain_question(rng, schema if turn == "write" else own)):
            asked, gold = made
        shown = gold
        if turn == "rewrite" or (turn == "check" and rng.random() >= _RIGHT):
            shown = other if rng.random() < _OTHERS else _spoiled(rng, gold, own)
        query, result = new.sql(shown), ""
        if turn != "write":
            result = new.sql(shown_result(path, shown, RESULT_CHARS))[:RESULT_CHARS]
        if turn == "rewrite" and shown != other and result.startswith("Error") and rng.random() < _UNASKED:
            asked = str(rng.choice(tasks)["question"])
        question, reply = new.prose(asked), prompts.fence(new.sql(gold))
        if turn == "check":
            user = prompts.check_message(question, query, result)
            reply = prompts.CORRECT if shown == gold else prompts.INCORRECT
        elif shown != gold:
            user = prompts.rewrite_message(question, query, result, prompts.INCORRECT)
        else:
            user = prompts.write_message(question)
        prefix, context = prompt(system, user)
        found.append([(context, False), (reply + IM_END, True)])
    return Dialogues(prefix, found)


def _spoiled(rng: random.Random, sql: str, schema: str) -> str:
    """The query with one or two of its names nearly right, as a policy writes them: a letter or a word more or less."""
    known = sorted({name for name in re.findall(r"\w+", schema) if name.lower() not in KEPT})
    used = sorted(set(re.findall(r"\w+", sql)).intersection(known))
    if not used:
        return sql
    name = rng.choice(used)
    words = WORD.findall(name)
    place = rng.randrange(len(words))
    joint = "_" if "_" in name else ""
    near = (
        name[:-1] if name.endswith("s") else f"{name}s",
        joint.join(words[:place] + words[place + 1 :]),
        joint.join([*words[: place + 1], *words[place:]]),
        joint.join([rng.choice(WORD.findall(rng.choice(known)) or words), *words]),
        name[: rng.randint(2, max(2, len(name) - 1))],
        rng.choice(known),
    )
    wrong = re.sub(rf"\b{name}\b", rng.choice(near) or name[0], sql, count=rng.choice((0, 1)))
    return wrong if rng.random() < _ONCE else _spoiled(rng, wrong, schema)


def _rearranged(rng: random.Random, schema: str, other: str, queries: Sequence[str]) -> tuple[str, str]:
    """Tables and columns in another order, some that no query reads left out: alone, and with tables of ``other``."""
    read = {word.lower() for query in queries for word in re.findall(r"\w+", query)}
    share = 1.0 if any("*" in query.replace("(*)", "") for query in queries) else rng.choice((1.0, 0.8, 0.5))
    tables = tables_of(schema)
    if len(tables) <= schema.count("\n"):
        return schema, schema  # with names that need quotes
    lines = []
    for name, columns in tables.items():
        if name.lower() not in read and rng.random() > share:
            continue
        rng.shuffle(columns)
        some = [column for column in columns if column.split()[0].lower() in read or rng.random() < share]
        lines.append(create_table(name, some or columns))
    known = read | {name.lower() for name in tables}
    strange = [create_table(*table) for table in tables_of(other).items() if table[0].lower() not in known]
    every = [*lines, *rng.sample(strange, min(len(strange), rng.choice((0, 0, 1, 2))))]
    rng.shuffle(every)
    return "\n".join(lines), "\n".join(every)
