"""Medical: questions on drugs and diseases, answered in prose, in English and Chinese. The bundled data is fiction.

The data is a folder with one SQLite database and questions: the bundled one, or your own.

The questions are in one file, ``questions.parquet``, ``.csv``, ``.jsonl`` or ``.json`` or ``qa_dataset.jsonl``, or in
two, ``train.parquet`` and ``val.parquet``, with the columns ``question`` and ``answer``; an answer may be missing.
Optional are ``id``, ``split`` (``train`` or ``validation``) and any others, which the tasks keep. Without ``split`` a
fifth of the questions is for validation, chosen by a hash of their text, so a question that repeats is on one side, and
the split does not depend on the order or on questions added later.

The database may have any tables: the agent reads its schema.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from groundwire.domains._readers import SUFFIXES, check_databases, check_unique_ids, choose_folder, read_tasks
from groundwire.domains._types import DataError, Domain, Task, TaskData
from groundwire.domains.held_out import question_key
from groundwire.tools.types import TEXT

__all__ = ["BUNDLED", "MedicalDomain", "domain"]

BUNDLED = Path(__file__).parent / "bundled"
_QUESTIONS = ("questions.parquet", "questions.csv", "questions.jsonl", "questions.json", "qa_dataset.jsonl")
_PARTS = {"train.parquet": "train", "val.parquet": "validation"}
_SPLITS = ("train", "validation")


class MedicalDomain(Domain):
    """Questions answered in prose. A task has id, question, answer, split, db_path (absolute), and its row's others."""

    name = "medical"
    default_reward = "rule_judge_hybrid"
    answers = TEXT
    bundled = BUNDLED
    breakdowns = {"hardness": {"easy": "easy", "medium": "medium", "hard": "hard"}}

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read ``data_dir``, else the bundled data. Raises :class:`DataError`."""
        folder, origin = choose_folder(data_dir, bundled=BUNDLED, bundled_is="generated fiction, no medical advice")
        files = sorted(path for path in folder.iterdir() if path.is_file())
        database = _only_one([file for file in files if file.suffix in SUFFIXES], folder, "SQLite file", SUFFIXES)
        check_databases([database])
        tasks = [{**row, "db_path": str(database)} for row in _read_questions(folder, files)]
        check_unique_ids(tasks, folder)
        parts: dict[str, list[Task]] = {split: [task for task in tasks if task["split"] == split] for split in _SPLITS}
        for split, tasks_of_split in parts.items():
            if not tasks_of_split:
                raise DataError(f"{folder} has no {split} questions; add some, or leave out the column split.")
        sizes = ", ".join(f"{split} {len(tasks_of_split):,} questions" for split, tasks_of_split in parts.items())
        missing = sum(not task["answer"] for task in tasks)
        sizes += f", {missing:,} without an answer" if missing else ""
        return TaskData(train=parts["train"], validation=parts["validation"], source=f"{origin}: {sizes}")

    def database(self, task: Task) -> str:
        """The absolute path of the SQLite file."""
        return str(task["db_path"])


domain = MedicalDomain()


def _read_questions(folder: Path, files: Iterable[Path]) -> list[dict[str, Any]]:
    """The questions with their splits: of the two parts, or of one file."""
    parts = {file: split for name, split in _PARTS.items() if (file := folder / name).is_file()}
    candidates = [file for file in files if file.name in _QUESTIONS]
    if len(parts) == len(_PARTS) and not candidates:
        rows = [(file, row) for file in parts for row in _read_rows(file)]
        unique = len({row["id"] for _, row in rows}) == len(rows)  # both files may count from 0
        ids = {file: "" if unique else f"{file.stem}-" for file in parts}
        return [{**row, "id": f"{ids[file]}{row['id']}", "split": parts[file]} for file, row in rows]
    choices = [*_QUESTIONS, " with ".join(_PARTS)]
    file = _only_one([*candidates, *parts], folder, "file of questions", choices)
    if file in parts:
        raise DataError(
            f"{folder} has {file.name} without {next(name for name in _PARTS if name != file.name)}; add it."
        )
    return [_with_split(row, file) for row in _read_rows(file)]


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows; one without an answer has the answer "", for a reward that can do without."""
    rows = read_tasks(file, text_columns=("question",), optional_columns=("answer",))
    return [{**row, "answer": (row.get("answer") or "").strip()} for row in rows]


def _only_one(found: list[Path], folder: Path, kind: str, choices: Iterable[str]) -> Path:
    if len(found) != 1:
        names = " and ".join(file.name for file in found) or "none"
        raise DataError(f"{folder} needs one {kind} ({', '.join(choices)}), and has {names}.")
    return found[0]


def _with_split(task: dict[str, Any], file: Path) -> dict[str, Any]:
    split = task.get("split") or _SPLITS[hashlib.sha256(question_key(task).encode()).digest()[0] % 5 == 0]
    if split not in _SPLITS:
        raise DataError(f"{file}, task {task['id']}: split is {split!r}; it is one of {', '.join(_SPLITS)}.")
    return {**task, "split": split}
