"""Medical: questions on drugs and diseases, answered in prose, in English and Chinese. The bundled data is fiction.

The data is a folder with one SQLite database and questions: the bundled one, or your own.

The questions are in one file, ``questions.parquet``, ``.csv``, ``.jsonl`` or ``.json`` or ``qa_dataset.jsonl``, or in
two, ``train.parquet`` and ``val.parquet``, of which a ``qa_dataset.jsonl`` beside them is the source and not read. The
columns are ``question`` and ``answer``; an answer may be missing. Optional are ``id``, ``split`` (``train`` or
``validation``) and any others, which the tasks keep. Without ``split`` a fifth of the questions is for validation,
chosen by a hash of their text, so a question that repeats is on one side, and the split does not depend on the order or
on questions added later.

The database may have any tables: the agent reads its schema.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from groundwire.domains._readers import check_databases, check_unique_ids, data_folder, read_tasks
from groundwire.domains._types import DataError, Domain, Task, TaskData
from groundwire.domains.held_out import question_key
from groundwire.tools.sql import SUFFIXES, has_suffix
from groundwire.tools.types import TEXT

__all__ = ["BUNDLED", "MedicalDomain", "domain"]

BUNDLED = Path(__file__).parent / "bundled"
_WHOLE = "qa_dataset.jsonl"
_QUESTIONS = ("questions.parquet", "questions.csv", "questions.jsonl", "questions.json", _WHOLE)
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
        content = "a folder with a database and questions"
        fiction = "generated fiction, no medical advice"
        folder, origin = data_folder(data_dir, domain=self.name, content=content, bundled=BUNDLED, bundled_is=fiction)
        files = sorted(path for path in folder.iterdir() if path.is_file())
        database = _only_one([file for file in files if has_suffix(file)], folder, "SQLite file", SUFFIXES)
        check_databases([database])
        tasks = [{**row, "db_path": str(database)} for row in _read_questions(folder, files)]
        check_unique_ids(tasks, folder)
        parts: dict[str, list[Task]] = {split: [task for task in tasks if task["split"] == split] for split in _SPLITS}
        for split, tasks_of_split in parts.items():
            if not tasks_of_split:
                raise DataError(f"{folder} has no {split} questions; add some, or leave out the column split.")
        sizes = ", ".join(f"{split} {len(tasks_of_split):,} questions" for split, tasks_of_split in parts.items())
        if (folder / _WHOLE).is_file() and (folder / min(_PARTS)).is_file():
            sizes += f" ({' and '.join(_PARTS)}; {_WHOLE} is not read)"
        missing = sum(not task["answer"] for task in tasks)
        sizes += f", {missing:,} without an answer" if missing else ""
        return TaskData(train=parts["train"], validation=parts["validation"], source=f"{origin}: {sizes}")

    def database(self, task: Task) -> str:
        """The absolute path of the SQLite file."""
        return str(task["db_path"])


domain = MedicalDomain()


def _read_questions(folder: Path, files: Iterable[Path]) -> list[dict[str, Any]]:
    """The questions with their splits: of the two parts, or of one file."""
    parts = [file for file in files if file.name in _PARTS]
    candidates = [file for file in files if file.name in _QUESTIONS]
    if len(parts) == len(_PARTS) and [file.name for file in candidates] == [_WHOLE]:
        candidates = []
    if candidates or len(parts) < len(_PARTS):
        choices = [*_QUESTIONS, " with ".join(_PARTS)]
        parts = [_only_one([*candidates, *parts], folder, "file of questions", choices)]
        if (name := parts[0].name) in _PARTS:
            raise DataError(f"{folder} has {name} without {next(other for other in _PARTS if other != name)}; add it.")
    texts, optional = ("question",), ("answer",)
    rows = [(file, row) for file in parts for row in read_tasks(file, text_columns=texts, optional_columns=optional)]
    both_count = len(parts) > 1 and len({row["id"] for _, row in rows}) < len(rows)  # from 0
    questions = []
    for file, row in rows:
        is_held_out = hashlib.sha256(question_key(row).encode()).digest()[0] % 5 == 0
        split = _PARTS.get(file.name) or row.get("split") or _SPLITS[is_held_out]
        if split not in _SPLITS:
            raise DataError(f"{file}, task {row['id']}: split is {split!r}; it is one of {', '.join(_SPLITS)}.")
        name = f"{file.stem}-{row['id']}" if both_count else row["id"]
        questions.append({**row, "id": name, "answer": (row.get("answer") or "").strip(), "split": split})
    return questions


def _only_one(files: list[Path], folder: Path, kind: str, choices: Iterable[str]) -> Path:
    if len(files) != 1:
        names = " and ".join(file.name for file in files) or "none"
        raise DataError(f"{folder} needs one {kind} ({', '.join(choices)}), and has {names}.")
    return files[0]
