"""Writes answers for BIRD's official evaluator (``evaluation_ex.py``, ``evaluation_f1.py``, ``evaluation_ves.py``).

It reads a JSON object of numbered predictions, a file with a gold query and its database on each line, and JSON lines
with the difficulty of each question. A question without an answer gets a query that is always wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groundwire.domains.spider.predictions import gold_lines, prediction_lines

__all__ = ["write_predictions"]

_SEPARATOR = "\t----- bird -----\t"


def write_predictions(
    folder: Path, tasks: Sequence[Mapping[str, Any]], answers: Mapping[str, str], sample: int
) -> None:
    """Write ``predictions.json`` (for a further ``sample`` ``predictions-2.json`` …), ``gold.sql`` and
    ``difficulty.jsonl``: the evaluator's ``--predicted_sql_path``, ``--ground_truth_path`` and ``--diff_json_path``.
    """
    name = "predictions.json" if sample == 0 else f"predictions-{sample + 1}.json"
    lines = prediction_lines(tasks, answers)
    numbered = {
        str(number): f"{sql}{_SEPARATOR}{task['db_id']}"
        for number, (sql, task) in enumerate(zip(lines, tasks, strict=True))
    }
    (folder / name).write_text(json.dumps(numbered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "gold.sql").write_text("\n".join(gold_lines(tasks)) + "\n", encoding="utf-8")
    levels = (json.dumps({"difficulty": task.get("difficulty") or "simple"}) + "\n" for task in tasks)
    (folder / "difficulty.jsonl").write_text("".join(levels), encoding="utf-8")
