"""``python -m domains.spider.prepare``: check a Spider folder or zip once, and write it as parquet.

The output is written to a temporary folder next to ``--out`` and renamed at the end, so a broken source or a full disk
leaves ``--out`` unchanged. Databases are copied, so the source may be deleted. Only a folder that ``prepare`` wrote is
ever replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

from groundwire.domains._types import DataError, Task
from groundwire.domains.spider import golds, loader
from groundwire.domains.spider.neighbours import write_neighbours
from groundwire.domains.spider.suspects import suspects
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.files import read_json
from groundwire.tools.terminal import Version, progress

__all__ = ["app", "prepare"]

WRITTEN_BY = "groundwire.domains.spider.prepare"
SAMPLE = 500
SUSPECTS = "suspects.json"

app = typer.Typer(add_completion=False)


@app.command()
def main(
    source: Annotated[Path, typer.Option(help="A Spider folder, or the zip it comes in")],
    out: Annotated[Path, typer.Option(help="The folder to write; replaced only if this command wrote it")],
    neighbours: Annotated[
        int,
        typer.Option(min=0, max=16, help="Variants of each database for the reward spider_test_suite, at most"),
    ] = 0,
    version: Version = False,
) -> None:
    """Check every gold query of a Spider download and write parquet files and copies of its databases."""
    with exit_on_user_error(exit_code=1):
        try:
            report = prepare(source, out, neighbours=neighbours)
        except OSError as error:
            cause = os.strerror(error.errno) if error.errno else str(error)
            file = error.filename2 or error.filename or out  # filename2: the target of a copy
            raise CommandError(f"preparing {out} failed: {cause} ({file}); it is unchanged.") from error
    typer.echo(_summary(report, out))


def prepare(source: Path, out: Path, *, timeout_s: float = 5.0, neighbours: int = 0) -> dict[str, Any]:
    """Write ``out`` from ``source`` and return its report. Raises :class:`DataError`, or OSError when writing fails.

    ``out`` gets ``train_spider.parquet``, ``test_dev.parquet``, ``test_dev_500.parquet`` (the source's own, else a
    sample), ``test.parquet`` if the source has a test set, ``database/``, ``test_database/`` (if the source has it) and
    ``report.json``. A gold is slow after ``timeout_s`` seconds. ``neighbours`` is the largest number of
    :mod:`groundwire.tools.neighbours` of a database; those that ``out`` has of the same data are kept.
    ``suspects.json`` lists the golds that are probably wrong, the most suspicious first.
    """
    if not source.exists():
        raise DataError(f"--source {source} does not exist; name a Spider folder or its zip.")
    if not source.is_dir() and not source.is_file():
        raise DataError(f"--source {source} is neither a folder nor a file; name a Spider folder or its zip.")
    out = out.resolve()
    _check_target(source.resolve(), out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        staging = Path(name)
        folder = _find_root(source if source.is_dir() else _extract(source, staging / "source"))
        train, splits = _read(folder)
        every = [*train, *(task for tasks in splits.values() for task in tasks)]
        _check_space(out.parent, {Path(task["db_path"]) for task in every})
        problems = golds.check_golds(every, timeout_s=timeout_s)
        report = _write(staging / "new", source.name, train=train, splits=splits, problems=problems)
        suspicious = suspects(every, problems)
        listed = json.dumps(suspicious, indent=1, ensure_ascii=False) + "\n"
        (staging / "new" / SUSPECTS).write_text(listed, encoding="utf-8")
        report["suspects"] = len(suspicious)
        _write_report(staging / "new", report)
        if neighbours:
            placed = [(task, _database_path(task)) for task in every]
            report["neighbours"] = write_neighbours(staging / "new", out, placed, problems, neighbours)
            _write_report(staging / "new", report)
        _swap(staging / "new", out, staging / "previous")
    return report


def _read(folder: Path) -> tuple[list[Task], dict[str, list[Task]]]:
    """The training tasks, and those of ``test_dev``, of ``test_dev_500`` and ``test`` if the folder has them."""
    train_files, validation_files = loader.find_files(folder)
    found = {name: file for name in loader.SPLITS for file in loader.split_file(folder, name)}
    files = {"test_dev": found.get("test_dev") or found.get("dev") or validation_files[0]}
    files |= {name: found[name] for name in ("test_dev_500", "test") if name in found}
    splits = {name: loader.read_tasks([file], folder, test=True) for name, file in files.items()}
    return loader.read_tasks(train_files, folder), splits


def _write(
    target: Path,
    source: str,
    *,
    train: list[Task],
    splits: dict[str, list[Task]],
    problems: dict[golds.Gold, golds.GoldProblem],
) -> dict[str, Any]:
    parts = {"train": train, "validation": splits["test_dev"]}
    parts |= {name: tasks for name, tasks in splits.items() if name != "test_dev"}
    databases = {_database_path(task): task["db_path"] for tasks in parts.values() for task in tasks}
    with progress("Copying databases", len(databases)) as advance:
        for name, path in databases.items():
            (target / name).parent.mkdir(parents=True)
            shutil.copyfile(path, target / name)
            advance()
    kept, judged, left_out = golds.leave_out(train, splits["test_dev"], problems)
    files = {"train_spider": kept, "test_dev": judged, "test_dev_500": _sample(judged)}
    for name in ("test_dev_500", "test"):
        if name in splits:
            files[name] = golds.leave_out([], splits[name], problems)[1]
    for name, tasks in files.items():
        _write_parquet(tasks, target / f"{name}.parquet")
    report = {
        "written_by": WRITTEN_BY,
        "source": source,
        "tasks": {name: len(tasks) for name, tasks in files.items()},
        "hardness": {"train_spider": _count_levels(kept), "test_dev": _count_levels(judged)},
        "databases": len(databases),
        "left_out_of_training": left_out,
        "golds": [
            {"id": task["id"], "split": part, "db_id": task["db_id"], **problems[golds.gold_of(task)]._asdict()}
            for part, tasks in parts.items()
            for task in tasks
            if golds.gold_of(task) in problems
        ],
    }
    _write_report(target, report)
    return report


def _write_report(target: Path, report: dict[str, Any]) -> None:
    (target / loader.REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _write_parquet(tasks: list[Task], file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    base = ["id", "db_id", "question", "query", "db_path", "hardness"]
    more = sorted({key for task in tasks for key, value in task.items() if isinstance(value, str)} - set(base))
    rows = [{**task, "db_path": _database_path(task)} for task in tasks]
    columns = {key: pa.array([row.get(key) for row in rows], pa.string()) for key in (*base, *more)}
    pq.write_table(pa.table(columns), file)


def _database_path(task: Task) -> str:
    """The place of the task's database in the output: in the folder that has it in the source."""
    folder = "test_database" if Path(task["db_path"]).parts[-3:-2] == ("test_database",) else "database"
    return f"{folder}/{task['db_id']}/{task['db_id']}.sqlite"


def _sample(tasks: list[Task]) -> list[Task]:
    """The ``SAMPLE`` tasks with the lowest hashes of their ids, which depend on neither order nor Python version."""
    by_hash = sorted(tasks, key=lambda task: hashlib.sha256(task["id"].encode()).digest())
    chosen = {task["id"] for task in by_hash[:SAMPLE]}
    return [task for task in tasks if task["id"] in chosen]


def _count_levels(tasks: list[Task]) -> dict[str, int]:
    return dict(Counter(task["hardness"] for task in tasks))


def _find_root(folder: Path) -> Path:
    """``folder``, or the first folder inside it that holds the data, as in the published zip."""
    candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    for candidate in candidates:
        try:
            loader.find_files(candidate)
        except DataError:
            continue
        return candidate
    return folder


def _extract(archive: Path, target: Path) -> Path:
    """Unpack the files that are read later, and nothing outside ``target``."""
    try:
        with zipfile.ZipFile(archive) as file:
            members = [member for member in file.infolist() if _is_wanted(archive, PurePosixPath(member.filename))]
            size = sum(member.file_size for member in members)
            if size > shutil.disk_usage(target.parent).free:
                raise DataError(
                    f"{archive} unpacks to {size / 1e6:.0f} MB and {target.parent.parent} has less; free some."
                )
            with progress("Unpacking", len(members)) as advance:
                for member in members:
                    file.extract(member, target)
                    advance()
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{archive} is not a readable zip ({error}); download it again.") from error
    target.mkdir(exist_ok=True)
    return target


def _is_wanted(archive: Path, member: PurePosixPath) -> bool:
    if member.is_absolute() or ".." in member.parts or "\\" in str(member):
        raise DataError(f"{archive} holds {str(member)!r}, which would be written outside its folder; do not trust it.")
    is_database = member.suffix in (".sqlite", ".db") or member.name == "schema.sql"
    return member.name in loader.FILES or (is_database and "__MACOSX" not in member.parts)


def _check_target(source: Path, out: Path) -> None:
    if out == source or out in source.parents:
        raise DataError(f"--out {out} holds the source {source}; choose another folder.")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        ours = read_json(out / loader.REPORT).get("written_by") == WRITTEN_BY
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise DataError(f"--out {out} exists and was not written by this command; choose another, or empty it.")


def _check_space(folder: Path, databases: Iterable[Path]) -> None:
    needed = sum(path.stat().st_size for path in databases)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"the databases take {needed / 1e6:.0f} MB and {folder} has {free / 1e6:.0f} MB free; free some."
        )


def _swap(new: Path, out: Path, previous: Path) -> None:
    """Move ``out`` to ``previous`` and ``new`` to ``out``."""
    try:
        if out.exists():
            out.rename(previous)
        new.rename(out)
    except BaseException:  # Ctrl-C between the two renames
        if previous.exists() and not out.exists():
            previous.rename(out)
        raise


def _summary(report: dict[str, Any], out: Path) -> str:
    tasks = ", ".join(f"{count:,} in {name}.parquet" for name, count in report["tasks"].items())
    left_out = ", ".join(f"{count:,} ({why})" for why, count in report["left_out_of_training"].items()) or "none"
    return (
        f"{out}: {tasks}; {report['databases']:,} databases\n"
        f"left out of training: {left_out}\n"
        f"golds that fail, are slow or return no rows: {len(report['golds']):,}, listed in {out / loader.REPORT}"
        f"\nsuspicious golds: {report['suspects']:,}, listed in {out / SUSPECTS}"
        f"{_neighbours_line(report.get('neighbours'))}"
    )


def _neighbours_line(made: dict[str, Any] | None) -> str:
    if made is None:
        return ""
    without = f"; {len(made['databases_without'])} databases have none" if made["databases_without"] else ""
    return (
        f"\nneighbours: {made['files']:,}; of {made['near_misses']:,} near misses that the original databases accept, "
        f"they separate {made['separated']:,}{without}"
    )


if __name__ == "__main__":
    app()
