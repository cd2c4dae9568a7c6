"""``--domain sqlite --data-dir FOLDER``: questions about your own SQLite databases.

The folder has SQLite files, anywhere below it, and questions (:mod:`groundwire.domains.sqlite.questions`). Every gold
query is run when the data is read, unless :mod:`groundwire.domains.prepare` wrote the folder; tasks whose gold cannot
judge an answer are left out as for Spider, and each broken gold is named with its row.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from groundwire.domains._readers import given_folder
from groundwire.domains._types import DataError, Task, TaskData
from groundwire.domains.spider.hardness import LEVELS
from groundwire.domains.spider.predictions import write_predictions
from groundwire.domains.sqlite.databases import Databases
from groundwire.domains.sqlite.questions import read_questions
from groundwire.domains.text_to_sql.domain import SqlDomain
from groundwire.domains.text_to_sql.golds import check_golds, gold_error, gold_of, leave_out
from groundwire.domains.text_to_sql.prepared_folder import replaced, reported_left_out, write_folder
from groundwire.domains.text_to_sql.splits import SPLIT_NAMES, size_of, split_tasks

__all__ = ["SqliteDomain", "domain"]

WRITTEN_BY = "groundwire.domains.sqlite"
_SENTENCES = 20
_log = logging.getLogger(__name__)

_folder = partial(given_folder, domain="sqlite", content="a folder of databases and questions")


class SqliteDomain(SqlDomain):
    """Text-to-SQL on a folder of yours. A task has id, split, db_id, question, query, db_path, hardness, and others."""

    name = "sqlite"
    default_reward = "spider_exec_match"
    gold_columns = ("query", "hardness")
    breakdowns = {"hardness": {level: level for level in LEVELS}}
    write_predictions = staticmethod(write_predictions)

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read the folder ``data_dir``. Raises :class:`DataError`."""
        return self.load_split("validation", data_dir)

    def load_split(self, split: str, data_dir: str | None = None) -> TaskData:
        """As :meth:`load`, with the tasks of ``split`` for validation."""
        folder = _folder(data_dir)
        tasks, places = read_questions(folder)
        splits, split_by = split_tasks(tasks, str(folder))
        split = SPLIT_NAMES.get(split, split)
        if split not in splits:
            raise DataError(f"{folder} has no split {split!r}; it has {', '.join(splits)}.")
        train, validation = splits["train"], splits[split]
        left_out, broken = reported_left_out(folder), list[str]()
        if left_out is None:
            problems = check_golds([*train, *validation])
            errors = [
                gold_error(places[task["id"]], task["db_id"], problems[gold_of(task)])
                for task in (*train, *validation)
                if gold_of(task) in problems
            ]
            broken = [error for error in errors if error]
            train, validation, left_out = leave_out(train, validation, problems)
        for name, kept in {"train": train, split: validation}.items():
            if not kept:
                reason = broken[0] if broken else "add questions, or leave out the column split."
                raise DataError(f"{folder} has no {name} question whose gold can judge an answer: {reason}")
        for line in broken[:_SENTENCES]:
            _log.warning("%s", line)
        if len(broken) > _SENTENCES:
            _log.warning(
                "%d more golds cannot judge an answer; groundwire prepare lists them", len(broken) - _SENTENCES
            )
        sizes = f"train {size_of(train)}, {split} {size_of(validation)}"
        return TaskData(
            train=train,
            validation=validation,
            source=f"--data-dir {data_dir}: {sizes}, split by {split_by}",
            left_out=left_out,
            folder=str(folder),
        )

    def database_folders(self, data_dir: str | None = None) -> list[Path]:
        """The folder of the data, and its databases, which may be links."""
        folder = _folder(data_dir)
        return [folder, *(Path(database.path) for database in Databases(folder).all)]

    def prepare(self, source: Path, out: Path, *, timeout_s: float = 5.0) -> dict[str, Any]:
        """Write ``out`` from ``source``: ``questions.parquet`` with its splits, ``databases/`` and the files of
        :func:`write_folder`. Raises :class:`DataError`, or OSError when writing fails.
        """
        folder = _folder(str(source), "--source")
        with replaced(out, folder, WRITTEN_BY) as staging:
            tasks, places = read_questions(folder)
            splits, _ = split_tasks(tasks, str(folder))
            others = [task for name, part in splits.items() if name != "train" for task in part]

            def files(problems: Any) -> tuple[dict[str, list[Task]], dict[str, int]]:
                kept, judged, left_out = leave_out(splits["train"], others, problems)
                return {"questions": [*kept, *judged]}, left_out

            return write_folder(
                staging / "new",
                out.resolve(),
                splits,
                files=files,
                place=lambda task: f"databases/{task['db_id']}/{task['db_id']}.sqlite",
                about={"written_by": WRITTEN_BY, "source": source.name},
                where=lambda task: places[task["id"]],
                timeout_s=timeout_s,
            )


domain = SqliteDomain()
