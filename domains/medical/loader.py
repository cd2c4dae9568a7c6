"""Reading a folder with one SQLite database and one file of questions: the bundled one, or your own.

The file is ``questions.parquet``, ``.csv``, ``.jsonl`` or ``.json`` with the columns ``question`` and ``answer``, and
as you like ``id``, ``split`` (``train`` or ``validation``) and more, which the tasks keep. Without ``split`` a fifth of
the questions is for validation, chosen by their ids: whatever the order, and whatever is added later.

Which tables the database has is not looked at: the agent reads its schema, and the reward does not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

from groundwire.domains._readers import choose_folder, is_sqlite, read_rows
from groundwire.domains._types import DataError, Task, TaskData
from groundwire.tools.schema import table_info
from groundwire.tools.sql import DatabaseError
from groundwire.tools.types import AnswerForm

__all__ = ["BUNDLED", "MedicalDomain", "domain"]

BUNDLED = Path(__file__).parent / "bundled"
_SUFFIXES = (".parquet", ".csv", ".jsonl", ".json")
_DATABASES = (".sqlite", ".sqlite3", ".db")
_SPLITS = ("train", "validation")


class MedicalDomain:
    """Questions answered in prose. A task has id, question, answer, db_path (absolute), and what else its row has."""

    name = "medical"
    default_reward = "rule_judge_hybrid"
    form: AnswerForm = "prose"

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read ``data_dir``, else the bundled data. Raises :class:`DataError`."""
        folder, chosen = choose_folder(data_dir, bundled=BUNDLED, bundled_is="generated fiction, no medical advice")
        database = _database(folder)
        file = _questions(folder)
        tasks = [{**_task(row, file, number), "db_path": database} for number, row in enumerate(read_rows(file))]
        twice = [name for name, count in Counter(task["id"] for task in tasks).items() if count > 1]
        if twice:
            raise DataError(f"{file}: {len(twice)} ids stand for more than one question, {twice[0]!r} among them.")
        parts: dict[str, list[Task]] = {split: [task for task in tasks if task["split"] == split] for split in _SPLITS}
        for split, part in parts.items():
            if not part:
                raise DataError(f"{file} has no {split} questions; add some, or leave out the column split.")
        sizes = ", ".join(f"{split} {len(part):,} questions" for split, part in parts.items())
        return TaskData(train=parts["train"], validation=parts["validation"], source=f"{chosen}: {sizes}")

    def database(self, task: Task) -> str:
        """The absolute path of the SQLite file."""
        return str(task["db_path"])


domain = MedicalDomain()


def _questions(folder: Path) -> Path:
    found = [folder / f"questions{suffix}" for suffix in _SUFFIXES if (folder / f"questions{suffix}").is_file()]
    if len(found) != 1:
        there = " and ".join(file.name for file in found) or "none"
        raise DataError(f"{folder} needs one of questions{', questions'.join(_SUFFIXES)}, and has {there}.")
    return found[0]


def _database(folder: Path) -> str:
    found = sorted(file for file in folder.iterdir() if file.suffix in _DATABASES and file.is_file())
    if len(found) != 1:
        there = " and ".join(file.name for file in found) or "none"
        raise DataError(f"{folder} needs one SQLite file ({', '.join(_DATABASES)}), and has {there}.")
    if not is_sqlite(found[0]):
        raise DataError(f"{found[0]} is no SQLite file; copy or download it again.")
    try:
        tables = table_info(found[0], example_values=0).text
    except DatabaseError as error:
        raise DataError(f"{error}; copy or download it again.") from error
    if not tables:
        raise DataError(f"{found[0]} has no tables; is it the right file?")
    return str(found[0])


def _task(row: Any, file: Path, number: int) -> dict[str, Any]:
    if not isinstance(row, dict) or None in row:  # csv puts what has no column under None
        raise DataError(f"{file}, row {number}: it does not fit the columns; remove or repair it.")
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise DataError(f"{file}, row {number}: {key} is {row.get(key)!r}, not text; remove or repair the row.")
    name = str(row["id"]) if row.get("id") not in (None, "") else f"{file.stem}-{number}"
    split = row.get("split") or _SPLITS[hashlib.sha256(name.encode()).digest()[0] % 5 == 0]
    if split not in _SPLITS:
        raise DataError(f"{file}, row {number}: split is {split!r}; it is one of {', '.join(_SPLITS)}.")
    return {**row, "id": name, "split": split}
