"""Reading Spider-shaped folders, whichever of the two layouts they have.

The *published* layout is JSON (``dev.json``, ``train_spider.json``, ``train_others.json``); the *parquet* layout is
what the field passes around and what :mod:`groundwire.domains.spider.prepare` writes. A folder with both is read as
parquet: ``prepare`` ran every gold when it wrote it and its ``report.json`` says what was left out, so nothing is run
again. Without that report (or ``gold_zero_rows.json``) the golds are run here: some seconds for all of Spider.

A gold that fails or is slow can judge nothing, so it is left out of training and validation alike. A gold that returns
no rows is left out of training only, where any empty answer would be rewarded; published accuracy counts it, and so
does validation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from groundwire.domains._readers import choose_folder, is_sqlite, read_json, read_rows, some
from groundwire.domains._types import DataError, Task, TaskData
from groundwire.domains.spider.hardness import hardness
from groundwire.tools.sql import DatabaseError, QueryError, QueryTimeoutError, run_query

__all__ = [
    "BUNDLED",
    "FAILS",
    "FILES",
    "NO_ROWS",
    "REPORT",
    "SLOW",
    "Gold",
    "GoldProblem",
    "SpiderDomain",
    "check_golds",
    "domain",
    "find_files",
    "gold_of",
    "read_tasks",
    "split",
]

FAILS, SLOW, NO_ROWS = "gold fails", "gold is slow", "gold returns no rows"

BUNDLED = Path(__file__).parent / "bundled"
DATABASE_FOLDERS = ("database", "test_database")
REPORT, ZERO_ROWS = "report.json", "gold_zero_rows.json"
# For each layout the files with training tasks, and those with validation tasks, of which the first found is read.
LAYOUTS = (
    (("train_spider.parquet",), ("test_dev.parquet", "test_dev_500.parquet")),
    (("train_spider.json", "train_others.json"), ("dev.json",)),
)
FILES = {name for layout in LAYOUTS for names in layout for name in names} | {REPORT, ZERO_ROWS}
# The published JSON repeats each gold as tokens and as a parse: ten times the bytes, and gold that nobody reads.
_DROPPED_COLUMNS = ("query_toks", "query_toks_no_value", "question_toks", "sql")


Gold = tuple[str, str]
"""A database's absolute path, and a query."""


class GoldProblem(NamedTuple):
    """Why a gold query is not fit to judge by: one of ``FAILS``, ``SLOW``, ``NO_ROWS``, and what the engine said."""

    reason: str
    detail: str = ""


class SpiderDomain:
    """Text-to-SQL. A task has id, db_id, question, query, db_path (absolute), hardness, and what else its row has."""

    name = "spider"
    default_reward = "spider_exec_match"

    def load(self, data_dir: str | None = None) -> TaskData:
        """Read ``data_dir``, else ``SPIDER_DATA_DIR``, else the bundled data. Raises :class:`DataError`."""
        folder, chosen = choose_folder(data_dir, bundled=BUNDLED, bundled_is="generated", env="SPIDER_DATA_DIR")
        train_files, validation_files = find_files(folder)
        train, validation = read_tasks(train_files, folder), read_tasks(validation_files, folder)
        left_out = _left_out_before(folder, train_files)
        if left_out is None:
            problems = _listed_problems(folder, train=train, dev=validation)
            if problems is None:
                problems = check_golds([*train, *validation])
            train, validation, left_out = split(train, validation, problems)
        return TaskData(
            train=train,
            validation=validation,
            source=f"{chosen}: train {_size(train)}, validation {_size(validation)}",
            left_out=left_out,
            folder=None if folder == BUNDLED.resolve() else str(folder),
        )

    def database(self, task: Task) -> str:
        """The absolute path of the task's SQLite file."""
        return str(task["db_path"])


domain = SpiderDomain()


def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files with training tasks, and with validation tasks. Raises :class:`DataError` where there are none."""
    for train_names, validation_names in LAYOUTS:
        train = [folder / name for name in train_names if (folder / name).is_file()]
        validation = [folder / name for name in validation_names if (folder / name).is_file()][:1]
        if train and validation:
            return train, validation
    wanted = "; or ".join(f"{' or '.join(train)} with {' or '.join(validation)}" for train, validation in LAYOUTS)
    raise DataError(f"{folder} is no Spider folder: looked for {wanted}. Name the folder that holds these files.")


def read_tasks(files: Iterable[Path], folder: Path) -> list[Task]:
    """The tasks of ``files``, their databases found under ``folder``. Raises :class:`DataError`."""
    tasks: list[dict[str, Any]] = [
        _task(row, file, index) for file in files for index, row in enumerate(read_rows(file))
    ]
    twice = [name for name, count in Counter(task["id"] for task in tasks).items() if count > 1]
    if twice:
        raise DataError(
            f"{folder}: {len(twice)} ids stand for more than one task, {twice[0]!r} among them; make them unique."
        )
    _find_databases(tasks, folder)
    return list(tasks)


def gold_of(task: Task) -> Gold:
    """The task's database and query: what a problem belongs to, since several questions share a gold."""
    return task["db_path"], task["query"]


def check_golds(tasks: Iterable[Task], *, timeout_s: float = 5.0) -> dict[Gold, GoldProblem]:
    """Run every gold once, with a progress bar on a terminal; those that are not fit to judge by, and why.

    A gold is slow after ``timeout_s`` seconds. Raises :class:`DataError` for a database that cannot be read.
    """
    from groundwire.tools.terminal import progress

    golds = sorted({gold_of(task) for task in tasks})  # by database: one open connection serves all of its golds
    problems = {}
    with progress("Running the golds", len(golds)) as on_end:
        for gold in golds:
            if problem := _check_gold(*gold, timeout_s):
                problems[gold] = problem
            on_end()
    return problems


def split(
    train: list[Task], validation: list[Task], problems: Mapping[Gold, GoldProblem]
) -> tuple[list[Task], list[Task], dict[str, int]]:
    """The tasks to train on, those to validate on, and how many were left out of training for which reason."""
    left_out = Counter(problems[gold_of(task)].reason for task in train if gold_of(task) in problems)
    fit = [task for task in train if gold_of(task) not in problems]
    judged = [task for task in validation if problems.get(gold_of(task), GoldProblem(NO_ROWS)).reason == NO_ROWS]
    return fit, judged, dict(left_out)


def _check_gold(database: str, query: str, timeout_s: float) -> GoldProblem | None:
    try:
        result = run_query(database, query, timeout_s=timeout_s, max_rows=1)
    except QueryTimeoutError as error:
        return GoldProblem(SLOW, str(error))
    except DatabaseError as error:
        raise DataError(f"{error}; copy or download it again.") from error
    except QueryError as error:
        return GoldProblem(FAILS, str(error))
    return None if result.rows else GoldProblem(NO_ROWS)


def _left_out_before(folder: Path, train_files: list[Path]) -> dict[str, int] | None:
    """What ``prepare`` left out when it wrote the parquet files, or None where it did not write them."""
    if train_files[0].suffix != ".parquet" or not (folder / REPORT).is_file():
        return None
    report = read_json(folder / REPORT)
    return report.get("left_out_of_training") if isinstance(report, dict) else None


def _listed_problems(folder: Path, **splits: list[Task]) -> dict[Gold, GoldProblem] | None:
    """The golds whose ids ``gold_zero_rows.json`` lists under the names of ``splits``, or None without that file."""
    if not (folder / ZERO_ROWS).is_file():
        return None
    listed = read_json(folder / ZERO_ROWS)
    if not isinstance(listed, dict):
        raise DataError(f"{folder / ZERO_ROWS} holds a {type(listed).__name__}, not ids by split; repair or remove it.")
    ids = {name: set(listed.get(name, ())) for name in splits}
    return {
        gold_of(task): GoldProblem(NO_ROWS)
        for name, tasks in splits.items()
        for task in tasks
        if task["id"] in ids[name]
    }


def _size(tasks: list[Task]) -> str:
    return f"{len(tasks):,} tasks ({len({task['db_id'] for task in tasks}):,} databases)"


def _task(row: Any, file: Path, index: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{file}, row {index}: a {type(row).__name__}, not a task; remove or repair it.")
    for key in ("question", "query", "db_id"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise DataError(f"{file}, row {index}: {key} is {row.get(key)!r}, not text; remove or repair the row.")
    task = {key: value for key, value in row.items() if key not in _DROPPED_COLUMNS}
    task["id"] = str(row["id"]) if row.get("id") not in (None, "") else f"{file.stem}-{index}"
    task["hardness"] = row.get("hardness") or hardness(row["query"])
    return task


def _find_databases(tasks: list[dict[str, Any]], folder: Path) -> None:
    """Set each task's ``db_path`` to an absolute path: its own where that exists, else the place of the layout."""
    known: dict[tuple[str, str], str | None] = {}
    missing = set()
    for task in tasks:
        key = (task["db_id"], task.get("db_path") or "")
        if key not in known:
            known[key] = _find_database(*key, folder)
        task["db_path"] = known[key]
        if task["db_path"] is None:
            missing.add(task["db_id"])
    if missing:
        places = " and ".join(str(folder / name) for name in DATABASE_FOLDERS)
        raise DataError(
            f"{len(missing)} of {len({task['db_id'] for task in tasks})} databases are missing ({some(missing)}): "
            f"looked for <db_id>/<db_id>.sqlite under {places}; put them there, or take their tasks out."
        )
    broken = {path for path in known.values() if path and not is_sqlite(path)}
    if broken:
        raise DataError(f"{len(broken)} databases are no SQLite files ({some(broken)}); copy or download them again.")


def _find_database(db_id: str, db_path: str, folder: Path) -> str | None:
    if Path(db_id).name != db_id or db_id == "..":
        raise DataError(f"{folder}: the db_id {db_id!r} is not a plain name; repair the row.")
    places = [folder / name / db_id / f"{db_id}.sqlite" for name in DATABASE_FOLDERS]
    if db_path:
        places.insert(0, folder / db_path)  # an absolute db_path stays as it is
    return next((str(place.resolve()) for place in places if place.is_file()), None)
