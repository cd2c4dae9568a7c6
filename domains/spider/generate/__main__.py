"""The bundled data: ``python -m domains.spider.generate --out DIR [--seed N]``.

Spider's own questions and databases are not ours to give away, and a laptop needs small ones, so the project writes its
own in Spider's layout: many small databases over many subjects, questions at the four levels of hardness, train and
validation split by database.

Validation has two halves, told apart by ``subject_split``. The databases of both are never trained on; those of the
``familiar`` half are about subjects that training databases are about too, those of the ``new`` half are about subjects
that no training database is about. What reinforcement learning gains on the second half is not knowledge of a subject.

The same seed gives the same tasks and rows.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from groundwire.domains.spider.generate.databases import Database, fill, make_database
from groundwire.domains.spider.generate.lexicon import FAMILIAR_SUBJECTS, NEW_SUBJECTS
from groundwire.domains.spider.generate.phrasing import spoken
from groundwire.domains.spider.generate.questions import write_question
from groundwire.domains.spider.hardness import hardness

__all__ = ["generate", "spider_tables", "tells_apart"]

TRAIN_DATABASES, TRAIN_QUESTIONS = 90, 20
HALF_DATABASES, HALF_QUESTIONS = 28, 9
_ATTEMPTS = 400


def generate(out: Path, *, seed: int = 0) -> dict[str, int]:
    """Write the data to ``out`` and return the number of tasks of each part: train, familiar, new."""
    rng = random.Random(seed)
    numbers: Counter[str] = Counter()
    seen: set[str] = set()
    databases: list[Database] = []

    def part(subjects: Iterable[str], *, split: str, n_databases: int, n_questions: int) -> list[dict[str, Any]]:
        shuffled = list(subjects)
        rng.shuffle(shuffled)
        tasks = []
        for i in range(n_databases):
            subject = shuffled[i % len(shuffled)]
            numbers[subject] += 1
            database = make_database(rng, subject, db_id=f"{subject}_{numbers[subject]}")
            databases.append(database)
            tasks += _tasks(rng, database, out, n_questions, seen, split)
        return tasks

    train = part(FAMILIAR_SUBJECTS, split="familiar", n_databases=TRAIN_DATABASES, n_questions=TRAIN_QUESTIONS)
    half = {"n_databases": HALF_DATABASES, "n_questions": HALF_QUESTIONS}
    familiar = part(FAMILIAR_SUBJECTS, split="familiar", **half)
    new = part(NEW_SUBJECTS, split="new", **half)
    validation = familiar + new
    rng.shuffle(validation)  # the first n are a fair sample of both halves

    _write_json(out / "tables.json", [spider_tables(database) for database in databases])
    for name, parquet, tasks in (("train_spider", "train_spider", train), ("dev", "test_dev", validation)):
        for i, task in enumerate(tasks):
            task["id"] = f"{name.partition('_')[0]}-{i:04}"
        _write_json(out / f"{name}.json", [{k: v for k, v in task.items() if k != "db_path"} for task in tasks])
        _write_parquet(out / f"{parquet}.parquet", tasks)
    _write_json(out / "report.json", {"left_out_of_training": {}})  # every gold was run, and none left out
    return {"train": len(train), "familiar": len(familiar), "new": len(new)}


def tells_apart(rows: list[tuple[Any, ...]]) -> bool:
    """Whether a result is one that a wrong query is unlikely to return: not empty, not only NULL or 0."""
    return any(value not in (None, 0) for row in rows for value in row)


def spider_tables(database: Database) -> dict[str, Any]:
    """The database's entry in ``tables.json``, in the published format."""
    columns: list[tuple[int, str]] = [(-1, "*")]
    types, primary, position = ["text"], [], {}
    for number, table in enumerate(database.tables):
        for column in table.columns:
            position[table.name, column.name] = len(columns)
            columns.append((number, column.name))
            types.append("text" if column.type == "text" else "number")
        primary.append(position[table.name, "id"])
    return {
        "db_id": database.db_id,
        "table_names": [spoken(table.name) for table in database.tables],
        "table_names_original": [table.name for table in database.tables],
        "column_names": [[number, spoken(name)] for number, name in columns],
        "column_names_original": [list(column) for column in columns],
        "column_types": types,
        "primary_keys": primary,
        "foreign_keys": [[position[k.child, k.column], position[k.parent, "id"]] for k in database.links],
    }


def _tasks(
    rng: random.Random, database: Database, out: Path, count: int, seen: set[str], split: str
) -> list[dict[str, Any]]:
    path = Path("database") / database.db_id / f"{database.db_id}.sqlite"
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    (out / path).unlink(missing_ok=True)
    connection = fill(database, str(out / path))
    tasks: list[dict[str, Any]] = []
    for _ in range(_ATTEMPTS):
        question = write_question(rng, database)
        if question.text in seen or not tells_apart(_run(connection, question.sql)):
            continue
        seen.add(question.text)
        tasks.append(
            {
                "id": "",
                "db_id": database.db_id,
                "question": question.text,
                "query": question.sql,
                "db_path": path.as_posix(),
                "hardness": hardness(question.sql),
                "subject": database.subject,
                "subject_split": split,
            }
        )
        if len(tasks) == count:
            break
    connection.close()
    return tasks


def _run(connection: sqlite3.Connection, sql: str) -> list[tuple[Any, ...]]:
    return connection.execute(sql).fetchall()


def _write_json(path: Path, rows: Any) -> None:
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _write_parquet(path: Path, tasks: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(tasks), path)


if __name__ == "__main__":
    import typer

    from groundwire.tools.terminal import Version, spinner

    def main(
        out: Annotated[Path, typer.Option(help="The folder to write")],
        seed: Annotated[int, typer.Option(help="Another seed, other data")] = 0,
        version: Version = False,
    ) -> None:
        """Generate Spider-shaped data."""
        with spinner("generating"):
            counts = generate(out, seed=seed)
        typer.echo(f"{out}: {', '.join(f'{name} {count}' for name, count in counts.items())}")

    typer.run(main)
