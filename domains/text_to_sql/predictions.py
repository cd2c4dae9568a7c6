"""Writes answers for the official evaluators: Spider's (``evaluation.py --pred … --gold …``), and BIRD's.

They read one query per line, in the order of the questions, and a gold file with ``query<TAB>db_id``. Spider's drops
empty lines and would then misalign the rest, so a question without an answer gets a query that is always wrong.
"""

from __future__ import annotations

import json
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
_BIRD_SEPARATOR = "\t----- bird -----\t"


def write_spider_predictions(
    folder: Path, tasks: Sequence[Mapping[str, Any]], answers: Mapping[str, str], sample: int
) -> None:
    """Write ``gold.sql`` and ``predictions.sql``, or for a further ``sample`` ``predictions-2.sql`` and so on."""
    _write_files(folder, sample, "sql", prediction_lines(tasks, answers), tasks)


def write_bird_predictions(
    folder: Path, tasks: Sequence[Mapping[str, Any]], answers: Mapping[str, str], sample: int
) -> None:
    """Write ``predictions.json`` (for a further ``sample`` ``predictions-2.json`` …), ``gold.sql`` and
    ``difficulty.jsonl``: the evaluator's ``--predicted_sql_path``, ``--ground_truth_path`` and ``--diff_json_path``.
    """
    pairs = zip(prediction_lines(tasks, answers), tasks, strict=True)
    numbered = {str(number): f"{sql}{_BIRD_SEPARATOR}{task['db_id']}" for number, (sql, task) in enumerate(pairs)}
    _write_files(folder, sample, "json", [json.dumps(numbered, indent=1, ensure_ascii=False)], tasks)
    levels = (json.dumps({"difficulty": task.get("difficulty") or "simple"}) for task in tasks)
    _write_lines(folder / "difficulty.jsonl", levels)


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


def _write_files(folder: Path, sample: int, kind: str, lines: list[str], tasks: Sequence[Mapping[str, Any]]) -> None:
    name = "predictions" if sample == 0 else f"predictions-{sample + 1}"
    _write_lines(folder / f"{name}.{kind}", lines)
    _write_lines(folder / "gold.sql", gold_lines(tasks))


def _write_lines(file: Path, lines: Iterable[str]) -> None:
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
