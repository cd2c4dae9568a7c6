"""Writes answers for Spider's official evaluator (``evaluation.py --pred … --gold …``).

One query per line, in the order of the questions; the gold file has ``query<TAB>db_id``. The evaluator drops empty
lines and would then misalign the rest, so a question without an answer gets a query that is always wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["NO_ANSWER", "gold_lines", "one_line", "prediction_lines", "write_predictions"]

NO_ANSWER = "SELECT 'no answer'"

_PIECE = re.compile(
    r"""(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\])
    |--[^\n]*|/\*.*?(?:\*/|\Z)|\s+""",
    re.VERBOSE | re.DOTALL,
)
_BREAKS = re.compile(r"[\t\r\n]")


def write_predictions(
    folder: Path, tasks: Sequence[Mapping[str, Any]], answers: Mapping[str, str], sample: int
) -> None:
    """Write ``gold.sql`` and ``predictions.sql``, or for a further ``sample`` ``predictions-2.sql`` and so on."""
    name = "predictions.sql" if sample == 0 else f"predictions-{sample + 1}.sql"
    (folder / name).write_text("\n".join(prediction_lines(tasks, answers)) + "\n", encoding="utf-8")
    (folder / "gold.sql").write_text("\n".join(gold_lines(tasks)) + "\n", encoding="utf-8")


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
