"""BIRD: questions with evidence over large SQLite databases, answered with SQL and judged by execution accuracy.

It is read in its official layout, or as ``python -m domains.prepare --domain bird`` writes it. The official files are
``train.json``, ``dev.json`` and ``mini_dev_sqlite.json``, in the folder or in a folder of it, with ``train_databases/``
or ``dev_databases/`` beside them: ``DB/DB.sqlite``, as unpacked. Their rows have ``db_id``, ``question``, ``evidence``
and ``SQL``, those for validation also ``question_id`` and ``difficulty``. The descriptions of columns
(``database_description/*.csv``) are not needed and not read.

The agent reads the evidence below the question. Training validates on ``dev``, or on ``mini_dev`` where that is
missing. Without ``train.json``, which comes with 33 GB of databases, a fifth of the databases of ``dev`` is held out
and the rest is for training (:mod:`groundwire.domains.text_to_sql.domain`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from groundwire.domains._readers import check_unique_ids, read_tasks
from groundwire.domains._types import DataError, Task
from groundwire.domains.text_to_sql.domain import Splits, SqlDomain, set_database_paths, split_tasks
from groundwire.domains.text_to_sql.predictions import prediction_lines, write_files, write_lines
from groundwire.domains.text_to_sql.prepared_folder import REPORT
from groundwire.tools.sql import has_suffix

_FILES = {"train": "train.json", "dev": "dev.json", "mini_dev": "mini_dev_sqlite.json"}
_DATABASE_FOLDERS = ("train_databases", "dev_databases")
_SEPARATOR = "\t----- bird -----\t"


class BirdDomain(SqlDomain):
    """Text-to-SQL with evidence. A task has id, db_id, question (with the evidence), evidence, difficulty, query (the
    file's SQL) and db_path (absolute). The splits for validation are ``dev`` and ``mini_dev``.
    """

    name = "bird"
    default_reward = "bird_exec_match"
    gold_columns = ("query", "difficulty")
    breakdowns = {"difficulty": {level: level for level in ("simple", "moderate", "challenging")}}
    content = "the folder of BIRD's files"
    gold_timeout_s = 30.0
    """As officially. Some golds of the largest databases take seconds."""
    links_databases = True

    def read(self, folder: Path, split: str = "") -> Splits:
        """The tasks of all files of ``folder``."""
        if (folder / REPORT).is_file():
            return Splits(_read_prepared(folder))
        files = {name: file for name, file_name in _FILES.items() if (file := _find(folder, file_name))}
        if not files:
            raise DataError(
                f"{folder} is no BIRD folder: looked for {', '.join(_FILES.values())} in it and in its folders."
            )
        splits = {name: _read_file(file, name) for name, file in files.items()}
        if "train" in splits and len(splits) > 1:
            return Splits(splits)
        only = next(iter(splits))  # mini_dev is a part of dev
        parts, split_by = split_tasks(splits[only], str(files[only]))
        return Splits(parts, f", {files[only].name} split by {split_by}")

    def database_folders(self, data_dir: str | None = None) -> list[Path]:
        """The folder of the data, and its databases, which may be links."""
        folder, _ = self.folder(data_dir)
        places = [place for name in _DATABASE_FOLDERS for place in (*folder.glob(name), *folder.glob(f"*/{name}"))]
        return [folder, *(file for place in places for file in place.glob("*/*") if has_suffix(file))]

    def write_predictions(self, folder: Path, tasks: Sequence[Task], answers: Mapping[str, str], sample: int) -> None:
        """Write ``predictions.json``, ``gold.sql`` and ``difficulty.jsonl``: ``--predicted_sql_path``,
        ``--ground_truth_path`` and ``--diff_json_path`` of BIRD's official evaluators.
        """
        pairs = zip(prediction_lines(tasks, answers), tasks, strict=True)
        numbered = {str(number): f"{sql}{_SEPARATOR}{task['db_id']}" for number, (sql, task) in enumerate(pairs)}
        write_files(folder, sample, "json", [json.dumps(numbered, indent=1, ensure_ascii=False)], tasks)
        levels = (json.dumps({"difficulty": task.get("difficulty") or "simple"}) for task in tasks)
        write_lines(folder / "difficulty.jsonl", levels)

    def place(self, task: Task) -> str:
        """A database's place in a prepared folder: in the folder of the same name as in the source."""
        return "/".join(Path(task["db_path"]).parts[-3:])


domain = BirdDomain()


def _find(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, *sorted(folder.glob(f"*/{name}"))) if file.is_file()), None)


def _read_file(file: Path, split: str) -> list[Task]:
    rows = read_tasks(file, text_columns=("question", "SQL", "db_id"), optional_columns=("evidence", "difficulty"))
    tasks = []
    for number, row in enumerate(rows):
        evidence = (row.get("evidence") or "").strip()
        task = {
            "id": f"{split}-{row.get('question_id', number)}",
            "db_id": row["db_id"],
            "question": f"{row['question']}\nEvidence: {evidence}" if evidence else row["question"],
            "evidence": evidence,
            "query": row["SQL"],
        }
        tasks.append(task | ({"difficulty": row["difficulty"]} if row.get("difficulty") else {}))
    check_unique_ids(tasks, file)
    places = [file.parent / name for name in _DATABASE_FOLDERS]
    remedy = "unpack the databases beside the file again"
    set_database_paths(tasks, file.parent, places, source=f" of {file}", remedy=remedy)
    return [*tasks]


def _read_prepared(folder: Path) -> dict[str, list[Task]]:
    splits: dict[str, list[Task]] = {}
    for file in sorted(folder.glob("*.parquet")):
        texts, optional = ("question", "query", "db_id", "db_path"), ("evidence", "difficulty")
        tasks = read_tasks(file, text_columns=texts, optional_columns=optional)
        remedy = "they are links into the folder that was prepared; prepare the data again"
        set_database_paths(tasks, folder, [folder], remedy=remedy)
        splits[file.stem] = [*tasks]
    if "train" not in splits or len(splits) < 2:
        raise DataError(f"{folder} lacks train.parquet or the questions for validation; prepare the data again.")
    return splits
