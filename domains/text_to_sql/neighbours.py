"""The neighbours of a prepared folder's databases (:mod:`groundwire.tools.neighbours`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groundwire.domains._types import Task
from groundwire.domains.text_to_sql.golds import NO_ROWS, Gold, GoldProblem, gold_of
from groundwire.tools.neighbours import FOLDER, Job, NeighboursError, build_all, neighbours_of
from groundwire.tools.terminal import progress

__all__ = ["watch_reward", "write_neighbours"]


def watch_reward(tasks: Sequence[Task]) -> str | None:
    """``spider_test_suite`` if the tasks' databases have the neighbours that it needs: the method of a domain."""
    try:
        neighbours_of(tasks[0]["db_path"], tasks[0]["query"])
    except (NeighboursError, IndexError):
        return None
    return "spider_test_suite"


def write_neighbours(
    target: Path,
    previous: Path,
    tasks: Iterable[tuple[Task, str]],
    problems: Mapping[Gold, GoldProblem],
    count: int,
) -> dict[str, Any]:
    """Write at most ``count`` neighbours of each database of ``target``, and return the numbers for the report.

    ``tasks`` are tasks with the place of their database in ``target``. ``previous`` is the folder of an earlier run.
    Until all are made they are in a hidden folder beside ``previous``, where the next run finds them after an
    interruption.
    """
    unfinished = previous.parent / f".{previous.name}.{FOLDER}"
    by_database: dict[str, list[Task]] = {}
    for task, place in tasks:
        if gold_of(task) not in problems or problems[gold_of(task)].reason == NO_ROWS:
            by_database.setdefault(place, []).append(task)
    jobs = [
        Job(
            database=str(target / place),
            golds=tuple(dict.fromkeys(task["query"] for task in own)),
            questions=tuple(dict.fromkeys(task["question"] for task in own)),
            folder=(unfinished / place).parent / FOLDER,
            count=count,
            previous=(previous / place).parent / FOLDER,
        )
        for place, own in sorted(by_database.items())
    ]
    with progress("Making neighbours", len(jobs)) as advance:
        built = build_all(jobs, on_end=advance)
    for job in jobs:
        finished = Path(job.database).parent / FOLDER
        shutil.rmtree(finished, ignore_errors=True)
        job.folder.rename(finished)
    shutil.rmtree(unfinished)
    return {
        "files": sum(each.files for each in built),
        "near_misses": sum(each.near_misses for each in built),
        "separated": sum(each.separated for each in built),
        "databases_without": {Path(each.database).stem: each.problem for each in built if not each.files},
    }
