"""Which questions of a folder like Spider's are for pretraining, and their golds in one spelling.

What differs between the people who wrote them and does not matter is made the same for all: spelling, quotes, blanks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from groundwire.domains import Task
from groundwire.rewards import RewardError
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.train.pretrain.schemas import schema_of

__all__ = ["FUNCTIONS", "KEYWORDS", "for_pretraining", "in_pretraining", "tidied"]

_TOKEN = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|[A-Za-z_]\w*|\d+(?:\.\d+)?|[<>!=]+|\S""")
FUNCTIONS = frozenset(["avg", "count", "max", "min", "sum"])
KEYWORDS = frozenset(
    [
        *("and", "as", "asc", "between", "by", "case", "cast", "desc", "distinct", "else", "end", "except", "exists"),
        *("from", "group", "having", "in", "intersect", "is", "join", "left", "like", "limit", "not", "null", "on"),
        *("or", "order", "outer", "select", "then", "union", "when", "where"),
    ]
)


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
        elif low in KEYWORDS:
            written = piece.upper()
        elif low in FUNCTIONS and low not in known:
            written = low
        elif piece[0].isalpha() or piece[0] == "_":
            written = known.get(low, piece.upper() if re.fullmatch(r"t\d+", low) else piece)
        called = piece == "(" and last in FUNCTIONS
        out += written if not out or written in ",.)" or last in ("(", ".") or called else f" {written}"
        last = written
    return out


def _checked(task: Task) -> str:
    """The gold, tidied if it then still returns the same."""
    gold, path = " ".join(str(task["query"]).split()), str(task["db_path"])
    tidy = tidied(gold, schema_of(path))
    try:
        return tidy if execution_match(tidy, gold, path).score else gold
    except RewardError:
        return gold
