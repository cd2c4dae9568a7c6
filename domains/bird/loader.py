"""Read BIRD in its official layout, or as ``groundwire prepare --domain bird`` writes it.

The official files are ``train.json``, ``dev.json`` and ``mini_dev_sqlite.json``, in the folder or in a folder of it,
with ``train_databases/`` or ``dev_databases/`` beside them: ``DB/DB.sqlite``, as unpacked. Their rows have ``db_id``,
``question``, ``evidence`` and ``SQL``, those for validation also ``question_id`` and ``difficulty``. The descriptions
of columns (``database_description/*.csv``) are not needed and not read.

The agent reads the evidence below the question. Training validates on ``dev``, or on ``mini_dev`` where that is
missing. Without ``train.json``, which comes with 33 GB of databases, a fifth of the databases of ``dev`` is held out
and the rest is for training (:mod:`groundwire.domains.text_to_sql.splits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from groundwire.domains._readers import check_unique_ids, first_names, given_folder, read_tasks
from groundwire.domains._types import DataError, Task, TaskData
from groundwire.domains.bird.predictions import write_predictions
from groundwire.domains.text_to_sql.domain import SqlDomain
from groundwire.domains.text_to_sql.golds import Gold, GoldProblem, check_golds, leave_out
from groundwire.domains.text_to_sql.prepared_folder import REPORT, replaced, reported_left_out, write_folder
from groundwire.domains.text_to_sql.splits import size_of, split_tasks
from groundwire.tools.files import shorten_repr
from groundwire.tools.sql import is_sqlite

__all__ = ["BirdDomain", "domain"]

WRITTEN_BY = "groundwire.domains.bird"
GOLD_TIMEOUT_S = 30.0
"""As officially. Some golds of the largest databases take seconds."""
_FILES = {"train": "train.json", "dev": "dev.json", "mini_dev": "mini_dev_sqlite.json"}
_DATABASE_FOLDERS = ("train_databases", "dev_databases")
_TEXTS = ("question", "SQL", "db_id")
_PREPARED_TEXTS = ("question", "query", "db_id", "db_path")

_folder = partial(given_folder, domain="bird", content="the folder of BIRD's files")


class BirdDomain(SqlDomain):
    """Text-to-SQL with evidence. A task has id, db_id, question (with the evidence), evidence, difficulty, query (the
    file's SQL) and db_path (absolute).
    """

    name = "bird"
    default_reward = "bird_exec_match"
    gold_columns = ("query", "difficulty")
    breakdowns = {"difficulty": {level: level for level in ("simple", "moderate", "challenging")}}
    write_predictions = staticmethod(write_predictions)

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read the folder ``data_dir``. Raises :class:`DataError`."""
        return self.load_split("validation", data_dir)

    def load_split(self, split: str, data_dir: str | None = None) -> TaskData:
        """As :meth:`load`, with the tasks of ``split`` for validation: ``dev`` or ``mini_dev``."""
        folder = _folder(data_dir)
        splits, note = _read(folder)
        name = _validation(splits) if split == "validation" else split
        if name not in splits:
            raise DataError(f"{folder} has no split {split!r}; it has {', '.join(splits)}.")
        train, validation = splits["train"], splits[name]
        left_out = reported_left_out(folder)
        if left_out is None:
            problems = check_golds([*train, *validation], timeout_s=GOLD_TIMEOUT_S)
            train, validation, left_out = leave_out(train, validation, problems)
        return TaskData(
            train=train,
            validation=validation,
            source=f"--data-dir {data_dir}: train {size_of(train)}, {name} {size_of(validation)}{note}",
            left_out=left_out,
            folder=str(folder),
        )

    def database_folders(self, data_dir: str | None = None) -> list[Path]:
        """The folder of the data, and its databases, which may be links."""
        folder = _folder(data_dir)
        places = [place for name in _DATABASE_FOLDERS for place in (*folder.glob(name), *folder.glob(f"*/{name}"))]
        return [folder, *(file.resolve() for place in places for file in place.glob("*/*.sqlite"))]

    def prepare(self, source: Path, out: Path, *, timeout_s: float = GOLD_TIMEOUT_S) -> dict[str, Any]:
        """Write ``out`` from ``source``: a parquet file of each split, links to the databases, which are too large
        to be copied, and the files of :func:`write_folder`. Raises :class:`DataError`, or OSError when writing fails.
        """
        folder = _folder(str(source), "--source")
        with replaced(out, folder, WRITTEN_BY) as staging:
            splits, _ = _read(folder)

            def files(problems: Mapping[Gold, GoldProblem]) -> tuple[dict[str, list[Task]], dict[str, int]]:
                train, _, left_out = leave_out(splits["train"], [], problems)
                judged = {name: leave_out([], tasks, problems)[1] for name, tasks in splits.items() if name != "train"}
                return {"train": train, **judged}, left_out

            return write_folder(
                staging / "new",
                out.resolve(),
                splits,
                files=files,
                place=_place,
                about={"written_by": WRITTEN_BY, "source": source.name},
                link=True,
                timeout_s=timeout_s,
            )


domain = BirdDomain()


def _read(folder: Path) -> tuple[dict[str, list[Task]], str]:
    """The tasks by split, ``train`` among them, and how they were split if the files do not say it."""
    if (folder / REPORT).is_file():
        return _read_prepared(folder), ""
    files = {split: file for split, name in _FILES.items() if (file := _find(folder, name))}
    if not files:
        raise DataError(
            f"{folder} is no BIRD folder: looked for {', '.join(_FILES.values())} in it and in its folders."
        )
    splits = {split: _read_file(file, split) for split, file in files.items()}
    if "train" in splits and len(splits) > 1:
        return {name: list(tasks) for name, tasks in splits.items()}, ""
    only = next(iter(splits))  # mini_dev is a part of dev
    parts, split_by = split_tasks(splits[only], str(files[only]))
    return parts, f", {files[only].name} split by {split_by}"


def _validation(splits: Mapping[str, list[Task]]) -> str:
    return next(name for name in ("validation", "dev", "mini_dev") if name in splits)


def _find(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, *sorted(folder.glob(f"*/{name}"))) if file.is_file()), None)


def _read_file(file: Path, split: str) -> list[dict[str, Any]]:
    rows = read_tasks(file, text_columns=_TEXTS, optional_columns=("evidence", "difficulty"))
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
    _set_database_paths(tasks, file)
    return tasks


def _set_database_paths(tasks: Iterable[dict[str, Any]], file: Path) -> None:
    """Make each task's ``db_path`` the place of its database beside ``file``."""
    missing = set()
    for task in tasks:
        db_id = task["db_id"]
        if Path(db_id).name != db_id or db_id == ".." or "\0" in db_id:
            raise DataError(f"{file}: the db_id {shorten_repr(db_id)} is not a plain name; repair the row.")
        places = [file.parent / name / db_id / f"{db_id}.sqlite" for name in _DATABASE_FOLDERS]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            missing.add(db_id)
        else:
            task["db_path"] = str(found)
    if missing:
        folders = " or ".join(str(file.parent / name) for name in _DATABASE_FOLDERS)
        raise DataError(
            f"{len(missing)} databases of {file} are missing ({first_names(missing)}): looked for "
            f"<db_id>/<db_id>.sqlite under {folders}; unpack the databases beside the file."
        )
    broken = {task["db_path"] for task in tasks if not is_sqlite(task["db_path"])}
    if broken:
        raise DataError(
            f"{len(broken)} databases are no readable SQLite files ({first_names(broken)}); unpack them again."
        )


def _read_prepared(folder: Path) -> dict[str, list[Task]]:
    splits: dict[str, list[Task]] = {}
    for file in sorted(folder.glob("*.parquet")):
        rows = read_tasks(file, text_columns=_PREPARED_TEXTS, optional_columns=("evidence", "difficulty"))
        splits[file.stem] = [{**row, "db_path": str(folder / row["db_path"])} for row in rows]
    if "train" not in splits or len(splits) < 2:
        raise DataError(f"{folder} lacks train.parquet or the questions for validation; prepare the data again.")
    broken = {task["db_path"] for tasks in splits.values() for task in tasks if not is_sqlite(task["db_path"])}
    if broken:
        raise DataError(
            f"{len(broken)} databases cannot be read ({first_names(broken)}): they are links into the folder that was "
            "prepared; prepare the data again."
        )
    return splits


def _place(task: Task) -> str:
    """A database's place in a prepared folder: in the folder of the same name as in the source."""
    return "/".join(Path(task["db_path"]).parts[-3:])
