"""The folder that ``prepare`` writes: checked tasks as parquet, their databases, a report and the suspicious golds.

It is written to a temporary folder next to ``out`` and renamed at the end, so a broken source or a full disk leaves
``out`` unchanged. Only a folder that the same command wrote is ever replaced.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from groundwire.domains._readers import read_json
from groundwire.domains._types import DataError
from groundwire.domains.text_to_sql.golds import NO_ROWS, Gold, GoldProblem, check_golds, gold_of
from groundwire.tools import files as json_files
from groundwire.tools.files import TemporaryFolder, copy_file, first_error, size_on_disk
from groundwire.tools.sql import files_of
from groundwire.tools.terminal import progress

if TYPE_CHECKING:
    from groundwire.domains.text_to_sql.domain import Splits, SqlDomain

REPORT, SUSPECTS = "report.json", "suspects.json"
_LEFT_OUT = TypeAdapter(dict[str, Annotated[int, Field(ge=0)]])
_FIRST_COLUMNS = ("id", "split", "db_id", "question", "query", "db_path", "hardness")
_SENTENCES = 20  # broken golds that are shown; the report has them all


@contextmanager
def replaced(out: Path, source: Path, written_by: str) -> Iterator[Path]:
    """A temporary folder, whose folder ``new`` is moved to ``out`` at the end.

    Raises :class:`DataError` if ``out`` holds ``source`` or anything that ``written_by`` did not write.
    """
    out = out.resolve()
    previous = out.with_name(f".{out.name}.previous")
    if previous.exists() and not out.exists():  # killed between the two renames
        previous.rename(out)
    _check_target(source.resolve(), out, written_by)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder(f".{out.name}.", out.parent) as staging:
        yield staging
        shutil.rmtree(previous, ignore_errors=True)
        try:
            if out.exists():
                out.rename(previous)
            (staging / "new").rename(out)
        except BaseException:  # Ctrl-C between the two renames
            if previous.exists() and not out.exists():
                previous.rename(out)
            raise
        shutil.rmtree(previous, ignore_errors=True)


def write_folder(target: Path, domain: SqlDomain, splits: Splits, source: str) -> dict[str, Any]:
    """Check the golds of all ``splits``, write ``target`` and return its report, which names the ``source``.

    The domain says which files there are, and where a database is: a copy of it, or a link to it.
    """
    from groundwire.domains.text_to_sql.suspects import suspects  # imports sqlglot, which takes long

    link, place = domain.links_databases, domain.place
    every = [task for tasks in splits.tasks.values() for task in tasks]
    databases = {place(task): task["db_path"] for task in every}
    needed = 0 if link else sum(map(size_on_disk, set(databases.values())))
    if needed > (free := shutil.disk_usage(target.parent.parent).free):
        raise DataError(
            f"the databases take {needed / 1e6:.0f} MB and {target.parent.parent} has {free / 1e6:.0f} MB free; free "
            "some."
        )
    problems = check_golds(every, timeout_s=domain.gold_timeout_s)
    with progress("Linking databases" if link else "Copying databases", len(databases)) as advance:
        for name, path in databases.items():
            (target / name).parent.mkdir(parents=True)
            if link:
                (target / name).symlink_to(Path(path).resolve())
            else:
                for end, file in files_of(path).items():
                    copy_file(file, f"{target / name}{end}")
            advance()
    written, left_out = domain.files(splits, problems)
    for name, tasks in written.items():
        _write_parquet([{**task, "db_path": place(task)} for task in tasks], target / f"{name}.parquet")
    suspicious = suspects(every, problems)
    report = {
        "written_by": domain.written_by,
        "source": source,
        "tasks": {name: len(tasks) for name, tasks in written.items()},
        "databases": len(databases),
        "left_out_of_training": left_out,
        "golds": broken_golds(splits, problems),
        "suspects": len(suspicious),
    }
    for name, value in {SUSPECTS: suspicious, REPORT: report}.items():
        (target / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def broken_golds(splits: Splits, problems: Mapping[Gold, GoldProblem]) -> list[dict[str, Any]]:
    """A row for each task whose gold has a problem."""
    return [
        {"id": task["id"], "where": splits.where(task), "split": split, "db_id": task["db_id"], **problem._asdict()}
        for split, tasks in splits.tasks.items()
        for task in tasks
        if (problem := problems.get(gold_of(task)))
    ]


def gold_errors(golds: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence about each of the first golds that cannot be run, not of those that only return no rows."""
    sentence = "{where} ({db_id}): {reason}: {detail}; correct the query, or remove the row."
    broken = [sentence.format_map(gold) for gold in golds if gold["reason"] != NO_ROWS]
    if len(broken) > _SENTENCES:
        broken[_SENTENCES:] = [
            f"… and {len(broken) - _SENTENCES:,} more; the report of groundwire prepare has them all"
        ]
    return broken


def reported_left_out(folder: Path) -> dict[str, int] | None:
    """What ``prepare`` left out of training in ``folder``, by reason; None without its report."""
    if not (folder / REPORT).is_file():
        return None
    report = read_json(folder / REPORT)
    if not isinstance(report, dict) or report.get("left_out_of_training") is None:
        return None
    if problem := first_error(_LEFT_OUT, report["left_out_of_training"]):
        raise DataError(
            f"{folder / REPORT}: left_out_of_training: {problem}; remove the file, or prepare the data again."
        )
    return dict(report["left_out_of_training"])


def summary(report: Mapping[str, Any], out: Path) -> str:
    """The report in some lines."""
    tasks = ", ".join(f"{count:,} in {name}.parquet" for name, count in report["tasks"].items())
    left_out = ", ".join(f"{count:,} ({why})" for why, count in report["left_out_of_training"].items()) or "none"
    return "\n".join(
        [
            f"{out}: {tasks}; {report['databases']:,} databases",
            f"left out of training: {left_out}",
            f"golds that fail, are slow, or return too much or nothing: {len(report['golds']):,}, "
            f"listed in {out / REPORT}",
            *(f"  {sentence}" for sentence in gold_errors(report["golds"])),
            f"suspicious golds: {report['suspects']:,}, listed in {out / SUSPECTS}",
        ]
    )


def _write_parquet(tasks: list[dict[str, Any]], file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = {name for task in tasks for name, value in task.items() if isinstance(value, str)}
    names = [name for name in _FIRST_COLUMNS if name in texts or name == "query"]
    names += sorted(texts.difference(names))
    columns = {name: pa.array([task.get(name) for task in tasks], pa.string()) for name in names}
    pq.write_table(pa.table(columns), file)


def _check_target(source: Path, out: Path, written_by: str) -> None:
    if out == source or out in source.parents:
        raise DataError(f"--out {out} holds the source {source}; choose another folder.")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    with suppress(OSError, ValueError, AttributeError):
        if json_files.read_json(out / REPORT).get("written_by") == written_by:
            return
    raise DataError(f"--out {out} exists and was not written by this command; choose another, or empty it.")
