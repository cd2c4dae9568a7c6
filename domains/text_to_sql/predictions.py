"""Writes answers for the official evaluators: Spider's (``evaluation.py --pred … --gold …``), and BIRD's.

They read one query per line, in the order of the questions, and a gold file with ``query<TAB>db_id``. Spider's drops
empty lines and would then misalign the rest, so a question without an answer gets a query that is always wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

NO_ANSWER = "SELECT 'no answer'"

_PIECE = re.compile(
    r"""(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\])
    |--[^\n]*|/\*.*?(?:\*/|\Z)|\s+""",
    re.VERBOSE | re.DOTALL,
)
_BREAKS = re.compile(r"[\t\r\n]")


def one_line(sql: str) -> str:
    """``sql`` on one line, without comments (``--`` would comment out the rest) and the last semicolon.

    Whitespace within quotes stays, but tabs and line breaks become spaces.
    """
    pieces = _PIECE.sub(lambda match: _BREAKS.sub(" ", match["quoted"]) if match["quoted"] else "\n", sql)
    return re.sub(r"\n+", " ", pieces).strip().rstrip(";").strip()


def prediction_lines(tasks: Iterable[Mapping[str, Any]], answers: Mapping[str, str]) -> list[str]:
    """One line per task; ``answers`` by task id."""
    return [one_line(answers.get(str(task["id"]), "")) or NO_ANSWER for task in tasks]


def gold_lines(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per task: its gold query and database."""
    return [f"{one_line(str(task['query']))}\t{task['db_id']}" for task in tasks]


def write_files(folder: Path, sample: int, kind: str, lines: list[str], tasks: Sequence[Mapping[str, Any]]) -> None:
    """Write ``predictions.KIND``, for a further ``sample`` ``predictions-2.KIND`` and so on, and ``gold.sql``."""
    name = "predictions" if sample == 0 else f"predictions-{sample + 1}"
    write_lines(folder / f"{name}.{kind}", lines)
    write_lines(folder / "gold.sql", gold_lines(tasks))


def write_lines(file: Path, lines: Iterable[str]) -> None:
    """Write a text file."""
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
