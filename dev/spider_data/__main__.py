"""The bundled data: ``python -m dev.spider_data --out DIR [--seed N]``.

Spider's own questions and databases may not be redistributed, and a laptop needs small ones. So the project generates
its own in Spider's shape: many small databases about many subjects, questions at the four levels of hardness, train and
validation split by database.

Validation has two halves, marked by ``subject_split``. No database of either is in the training data. The ``familiar``
half is about the subjects of the training databases, the ``new`` half is about other subjects: knowledge of a subject
cannot explain what reinforcement learning gains there.

The same seed gives the same tasks and rows.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from dev.spider_data.databases import Database, fill, make_database
from dev.spider_data.lexicon import FAMILIAR_SUBJECTS, NEW_SUBJECTS
from dev.spider_data.questions import write_question
from groundwire.domains.spider.hardness import hardness

__all__ = ["generate"]

TRAIN_DATABASES, TRAIN_QUESTIONS = 90, 20
HALF_DATABASES, HALF_QUESTIONS = 28, 9
_ATTEMPTS = 400


def generate(out: Path, *, seed: int = 0) -> dict[str, int]:
    """Write the data to ``out`` and return the number of tasks of each part: train, familiar, new."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    numbers: Counter[str] = Counter()
    seen: set[str] = set()

    def part(subjects: Iterable[str], *, split: str, n_databases: int, n_questions: int) -> list[dict[str, Any]]:
        shuffled = list(subjects)
        rng.shuffle(shuffled)
        tasks = []
        for i in range(n_databases):
            subject = shuffled[i % len(shuffled)]
            numbers[subject] += 1
            database = make_database(rng, subject, db_id=f"{subject}_{numbers[subject]}")
            tasks += _tasks(rng, database, out, n_questions, seen, split)
        return tasks

    train = part(FAMILIAR_SUBJECTS, split="familiar", n_databases=TRAIN_DATABASES, n_questions=TRAIN_QUESTIONS)
    half = {"n_databases": HALF_DATABASES, "n_questions": HALF_QUESTIONS}
    familiar = part(FAMILIAR_SUBJECTS, split="familiar", **half)
    new = part(NEW_SUBJECTS, split="new", **half)
    validation = familiar + new
    rng.shuffle(validation)  # so that the first n are a fair sample of both halves

    for prefix, name, tasks in (("train", "train", train), ("dev", "validation", validation)):
        for i, task in enumerate(tasks):
            task["id"] = f"{prefix}-{i:04}"
        pq.write_table(pa.Table.from_pylist(tasks), out / f"generated_{name}.parquet")
    # Every gold was run here, so the loader need not.
    (out / "report.json").write_text(json.dumps({"left_out_of_training": {}}, indent=1) + "\n", encoding="utf-8")
    return {"train": len(train), "familiar": len(familiar), "new": len(new)}


def _tasks(
    rng: random.Random, database: Database, out: Path, count: int, seen: set[str], split: str
) -> list[dict[str, Any]]:
    path = Path("database") / database.db_id / f"{database.db_id}.sqlite"
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    (out / path).unlink(missing_ok=True)
    tasks: list[dict[str, Any]] = []
    with closing(fill(database, str(out / path))) as connection:
        for _ in range(_ATTEMPTS):
            question = write_question(rng, database)
            if question.text in seen or not _is_distinctive(connection.execute(question.sql).fetchall()):
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
    return tasks


def _is_distinctive(rows: list[tuple[Any, ...]]) -> bool:
    """Whether a wrong query is unlikely to return these rows: some value is neither NULL nor 0."""
    return any(value not in (None, 0) for row in rows for value in row)


if __name__ == "__main__":
    from dev.generate_command import run_generator

    run_generator(generate)
