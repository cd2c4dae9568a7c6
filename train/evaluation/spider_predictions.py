"""Answers in the files that Spider's official evaluator reads (``evaluation.py --pred … --gold …``).

One query a line in the order of the questions; the gold file beside it has ``query<TAB>db_id``. The evaluator drops
empty lines, which would shift all that follow, so a question without an answer gets a query that is wrong for sure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["NO_ANSWER", "gold_lines", "one_line", "prediction_lines"]

NO_ANSWER = "SELECT 'no answer'"

_PIECE = re.compile(
    r"""(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\])
    |--[^\n]*|/\*.*?(?:\*/|\Z)|\s+""",
    re.VERBOSE | re.DOTALL,
)
_BREAKS = re.compile(r"[\t\r\n]")


def one_line(sql: str) -> str:
    """``sql`` on one line, without its comments (a ``--`` would swallow the rest) and its last semicolon.

    Blanks within quotes stay, but for tabs and line breaks, which the file cannot hold.
    """
    pieces = _PIECE.sub(lambda match: _BREAKS.sub(" ", match["quoted"]) if match["quoted"] else "\n", sql)
    return re.sub(r"\n+", " ", pieces).strip().rstrip(";").strip()


def prediction_lines(tasks: Iterable[Mapping[str, Any]], answers: Mapping[str, str]) -> list[str]:
    """One line for each task; ``answers`` by task id."""
    return [one_line(answers.get(str(task["id"]), "")) or NO_ANSWER for task in tasks]


def gold_lines(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The gold beside it."""
    return [f"{one_line(str(task['query']))}\t{task['db_id']}" for task in tasks]
