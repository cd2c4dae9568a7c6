"""Dialogues about real databases, from the training questions of a folder like Spider's, for a larger starter.

A few thousand questions about a hundred databases are learned by heart long before they are understood. So what does
not matter is changed from one dialogue to the next: names that question and query share (the same word for the same
word, in schema, question, query and result), the order of tables and columns, and what else there is beside those that
are asked about. What does not matter and differs between the people who wrote the queries is made the same for all:
spelling, quotes and blanks.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from adapters import prompts
from domains import Task
from domains.spider.databases import Database, Link, fill, make_database
from domains.spider.lexicon import FAMILIAR_SUBJECTS, SYLLABLES
from domains.spider.questions import write_question
from rewards import RewardError
from rewards.execution_match import execution_match
from tools.schema import RESERVED, table_info
from tools.sql import DatabaseError, QueryError, render, run_query
from train.local.corpus import Dialogues, Segment, Stage, prompt
from train.local.plain import TABLE, plain_question
from train.local.tokenizer import IM_END

__all__ = [
    "RESULT_CHARS",
    "for_pretraining",
    "in_pretraining",
    "made_up_dialogues",
    "names",
    "real_dialogues",
    "tidied",
]

_TABLE_CHARS = 4000
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
"""Share of the turns about :func:`train.local.plain.plain_question` instead of a task."""
_RENAMED = 0.8
"""Share of the dialogues with other names."""
_PLURAL_TABLES, _SPELLINGS = 0.4, (4, 3, 2, 1)
"""Of generated databases: the share with tables in the plural; weights of ``ab_cd``, ``Ab_Cd``, ``AbCd``, ``AB_CD``."""
_WORDS = (1, 1, 1, 2, 2, 3)
"""How many words stand for one."""
_MADE_UP = 0.25
"""Share of the other names that are no words: what the vocabulary lacks has to be copied piece by piece."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_TOKEN = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|[A-Za-z_]\w*|\d+(?:\.\d+)?|[<>!=]+|\S""")
_FUNCTIONS = frozenset(["avg", "count", "max", "min", "sum"])
_KEYWORDS = frozenset(
    [
        *("and", "as", "asc", "between", "by", "case", "cast", "desc", "distinct", "else", "end", "except", "exists"),
        *("from", "group", "having", "in", "intersect", "is", "join", "left", "like", "limit", "not", "null", "on"),
        *("or", "order", "outer", "select", "then", "union", "when", "where"),
    ]
)
_ASKING = frozenset(
    [
        *("above", "all", "average", "below", "different", "each", "equal", "ever", "fewest", "find", "give"),
        *("highest", "how", "largest", "least", "less", "list", "lowest", "maximum", "mean", "minimum", "most"),
        *("number", "return", "show", "smallest", "sorted", "than", "that", "the", "their", "there", "total"),
        *("what", "which", "whose", "with"),
    ]
)
_KEPT = RESERVED | _KEYWORDS | _FUNCTIONS | _ASKING
_KEPT |= {"blob", "column", "error", "int", "more", "no", "of", "real", "row", "such", "syntax", "text"}
_KEPT |= {"id", "name", "t"}
"""Words that keep their meaning: those of SQL and its errors, those that say what is asked, and what stands in every
schema or numbers an alias."""


def in_pretraining(task: Task) -> bool:
    """Whether the task's database is one of those to pretrain on, two of three.

    Reinforcement learning needs databases that the model does not know by heart.
    """
    return zlib.crc32(Path(str(task["db_path"])).stem.encode()) % 3 > 0


def for_pretraining(tasks: Sequence[Task]) -> list[Task]:
    """The tasks to pretrain on, their golds :func:`tidied` where that changes no result."""
    return [{**task, "query": _checked(task)} for task in tasks if in_pretraining(task)]


def tidied(sql: str, schema: str) -> str:
    """``sql`` in one spelling: names as ``schema`` has them, keywords in capitals, values in single quotes."""
    known = {name.lower(): name for name in re.findall(r"[A-Za-z_]\w*", schema)}
    out, last = "", ""
    for piece in _TOKEN.findall(sql.rstrip("; \n")):
        low, written = piece.lower(), piece
        if piece[0] == '"' and piece[1:-1].lower() not in known:
            written = "'" + piece[1:-1].replace("'", "''") + "'"
        elif low in _KEYWORDS:
            written = piece.upper()
        elif low in _FUNCTIONS and low not in known:
            written = low
        elif piece[0].isalpha() or piece[0] == "_":
            written = known.get(low, piece.upper() if re.fullmatch(r"t\d+", low) else piece)
        called = piece == "(" and last in _FUNCTIONS
        out += written if not out or written in ",.)" or last in ("(", ".") or called else f" {written}"
        last = written
    return out


def names(tasks: Sequence[Task]) -> list[str]:
    """The words of the tasks' schemas, sorted, in lower case and without a plural's s."""
    schemas = {str(task["db_path"]): None for task in tasks}
    return sorted({_stem(word) for path in schemas for word in _WORD.findall(_schema(path))} - _KEPT)


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
        yield _about(rng, by_path[path], _schema(rng.choice(paths)), pool, _TURNS)


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
            other = _schema(str(path))
            path.unlink()


def _spelled(rng: random.Random, database: Database) -> Callable[[str], str]:
    """Writes the database's names in SQL as another author would: tables in the plural, words joined otherwise."""
    columns = {column.name for table in database.tables for column in table.columns}
    tables = {table.name for table in database.tables} - columns
    plural = rng.random() < _PLURAL_TABLES
    join = rng.choices((str, str.title, lambda name: name.title().replace("_", ""), str.upper), _SPELLINGS)[0]

    def put(found: re.Match[str]) -> str:
        name = found[0]
        if name in tables and plural:
            name = name[:-1] + "ies" if name.endswith("y") else name + "s"
        return join(name) if found[0] in tables | columns else name

    return lambda sql: re.sub(r"'[^']*'|\w+", put, sql)


def _about(
    rng: random.Random, tasks: Sequence[Task], strange: str, pool: Sequence[str], turns: Sequence[str]
) -> Dialogues:
    """Dialogues about the one database of ``tasks``, which may get tables of the schema ``strange``."""
    path = str(tasks[0]["db_path"])
    chosen = rng.sample(tasks, min(len(turns), len(tasks)))
    others = [str(rng.choice(tasks)["query"]) for _ in chosen]
    own, schema = _rearranged(rng, _schema(path), strange, [*(str(task["query"]) for task in chosen), *others])
    new = _Names(rng, schema, pool, _meant(chosen)) if rng.random() < _RENAMED else _Names(rng, "", (), set())
    system, found = new.sql(schema), list[list[Segment]]()
    prefix = ""
    for turn, task, other in zip(turns, chosen, others, strict=False):
        asked, gold = str(task["question"]), str(task["query"])
        if rng.random() < _PLAIN and (made := plain_question(rng, schema if turn == "write" else own)):
            asked, gold = made
        shown = gold
        if turn == "rewrite" or (turn == "check" and rng.random() >= _RIGHT):
            shown = other if rng.random() < _OTHERS else _spoiled(rng, gold, own)
        query, result = new.sql(shown), new.sql(_result(path, shown))[:RESULT_CHARS] if turn != "write" else ""
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
    known = sorted({name for name in re.findall(r"\w+", schema) if name.lower() not in _KEPT})
    used = [name for name in known if re.search(rf"\b{name}\b", sql)]
    if not used:
        return sql
    name = rng.choice(used)
    words = _WORD.findall(name)
    place = rng.randrange(len(words))
    joint = "_" if "_" in name else ""
    near = (
        name[:-1] if name.endswith("s") else f"{name}s",
        joint.join(words[:place] + words[place + 1 :]),
        joint.join([*words[: place + 1], *words[place:]]),
        joint.join([rng.choice(_WORD.findall(rng.choice(known)) or words), *words]),
        name[: rng.randint(2, max(2, len(name) - 1))],
        rng.choice(known),
    )
    wrong = re.sub(rf"\b{name}\b", rng.choice(near) or name[0], sql, count=rng.choice((0, 1)))
    return wrong if rng.random() < _ONCE else _spoiled(rng, wrong, schema)


def _schema(path: str) -> str:
    return table_info(path, max_chars=_TABLE_CHARS, sample_values=0, keys=False).text


def _checked(task: Task) -> str:
    """The gold, tidied if it then still returns the same."""
    gold, path = " ".join(str(task["query"]).split()), str(task["db_path"])
    tidy = tidied(gold, _schema(path))
    try:
        return tidy if execution_match(tidy, gold, path).score else gold
    except RewardError:
        return gold


@functools.lru_cache(maxsize=50_000)
def _stem(word: str) -> str:
    """In lower case, and without the plural's s."""
    low = word.lower()
    if len(low) > 4 and low.endswith("ies"):
        return low[:-3] + "y"
    return low[:-1] if len(low) > 3 and low.endswith("s") and not low.endswith(("ss", "us", "is")) else low


def _meant(tasks: Sequence[Task]) -> set[str]:
    """Words of the golds that their questions do not say: to know them takes their meaning, so they keep it."""
    meant = set[str]()
    for task in tasks:
        asked, answered = (set(map(_stem, _WORD.findall(str(task[key])))) for key in ("question", "query"))
        meant |= answered - asked
    return meant


class _Names:
    """Other words for some of the schema's words, the same everywhere, in the case and number that was there.

    Some are two or three: ``pet`` becomes ``river stone`` in a question and ``river_stone`` in a query. Copying names
    of several words is what goes wrong most in databases that were never read.
    """

    def __init__(self, rng: random.Random, schema: str, pool: Sequence[str], kept: set[str]) -> None:
        stems = sorted({_stem(word) for word in _WORD.findall(schema)} - _KEPT - kept)
        share = rng.choice((0.3, 0.6, 1.0))
        taken = {*stems, *kept, *_KEPT}

        def another() -> str:
            while True:
                word = _made_up(rng) if not pool or rng.random() < _MADE_UP else rng.choice(pool)
                if word not in taken:
                    taken.add(word)
                    return word

        self._new = {stem: [another() for _ in range(rng.choice(_WORDS))] for stem in stems if rng.random() < share}

    def prose(self, text: str) -> str:
        """A question, or a value."""
        return _WORD.sub(lambda found: self._put(found[0], " "), text)

    def sql(self, text: str) -> str:
        """A schema, a query, or what came of one."""
        parts = re.split(r"('[^']*')", text)
        return "".join(
            self.prose(part) if number % 2 else _WORD.sub(lambda found: self._put(found[0], "_"), part)
            for number, part in enumerate(parts)
        )

    def _put(self, word: str, joint: str) -> str:
        words = self._new.get(_stem(word))
        if words is None:
            return word
        if word.lower() != _stem(word):
            last = words[-1]
            words = [*words[:-1], last[:-1] + "ies" if last.endswith("y") else last + "s"]
        if word.isupper() and len(word) > 1:
            words = [each.upper() for each in words]
        elif word[0].isupper():
            words = [each.title() for each in words]
        return joint.join(words)


def _made_up(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3))))


def _rearranged(rng: random.Random, schema: str, other: str, queries: Sequence[str]) -> tuple[str, str]:
    """Tables and columns in another order, some that no query reads left out: alone, and with tables of ``other``."""
    read = {word.lower() for query in queries for word in re.findall(r"\w+", query)}
    share = 1.0 if any("*" in query.replace("(*)", "") for query in queries) else rng.choice((1.0, 0.8, 0.5))
    tables = [found.groups() for line in schema.split("\n") if (found := TABLE.fullmatch(line))]
    if len(tables) <= schema.count("\n"):
        return schema, schema  # with names that need quotes
    lines = []
    for name, listed in tables:
        if name.lower() not in read and rng.random() > share:
            continue
        columns = listed.split(" , ")
        rng.shuffle(columns)
        some = [column for column in columns if column.split()[0].lower() in read or rng.random() < share]
        lines.append(f"CREATE TABLE {name} ( {' , '.join(some or columns)} )")
    known = read | {name.lower() for name, _ in tables}
    strange = [line for line in other.split("\n") if (found := TABLE.fullmatch(line)) and found[1].lower() not in known]
    every = [*lines, *rng.sample(strange, min(len(strange), rng.choice((0, 0, 1, 2))))]
    rng.shuffle(every)
    return "\n".join(lines), "\n".join(every)


def _result(path: str, sql: str) -> str:
    try:
        return render(run_query(path, sql, max_rows=100), max_chars=RESULT_CHARS)
    except (QueryError, DatabaseError) as error:
        return f"Error: {error}"[:RESULT_CHARS]
