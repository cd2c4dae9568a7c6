"""Check a Spider folder or zip once, and write it as parquet: ``groundwire prepare``.

Databases are copied, so the source may be deleted. See :mod:`groundwire.domains.text_to_sql.prepared_folder`.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from groundwire.domains._types import DataError, Task
from groundwire.domains.prepare import app
from groundwire.domains.spider import loader
from groundwire.domains.text_to_sql.golds import Gold, GoldProblem, leave_out
from groundwire.domains.text_to_sql.prepared_folder import replaced, write_folder
from groundwire.tools.terminal import progress

WRITTEN_BY = "groundwire.domains.spider.prepare"
SAMPLE = 500


def prepare(source: Path, out: Path, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Write ``out`` from ``source`` and return its report. Raises :class:`DataError`, or OSError when writing fails.

    ``out`` gets ``train_spider.parquet``, ``test_dev.parquet``, ``test_dev_500.parquet`` (the source's own, else a
    sample), ``test.parquet`` if the source has a test set, ``database/``, ``test_database/`` (if the source has it) and
    the files of :func:`write_folder`.
    """
    if not source.exists():
        raise DataError(f"--source {source} does not exist; name a Spider folder or its zip.")
    if not source.is_dir() and not source.is_file():
        raise DataError(f"--source {source} is neither a folder nor a file; name a Spider folder or its zip.")
    with replaced(out, source, WRITTEN_BY) as staging:
        folder = _find_root(source if source.is_dir() else _extract(source, staging / "source"))
        train, splits = _read(folder)
        parts = {"train": train, "validation": splits["test_dev"]}
        parts |= {name: tasks for name, tasks in splits.items() if name != "test_dev"}

        def files(problems: Mapping[Gold, GoldProblem]) -> tuple[dict[str, list[Task]], dict[str, int]]:
            kept, judged, left_out = leave_out(train, splits["test_dev"], problems)
            written = {"train_spider": kept, "test_dev": judged, "test_dev_500": _sample(judged)}
            for name in ("test_dev_500", "test"):
                if name in splits:
                    written[name] = leave_out([], splits[name], problems)[1]
            return written, left_out

        return write_folder(
            staging / "new",
            out.resolve(),
            parts,
            files=files,
            place=_database_path,
            about={"written_by": WRITTEN_BY, "source": source.name},
            timeout_s=timeout_s,
        )


def _read(folder: Path) -> tuple[list[Task], dict[str, list[Task]]]:
    """The training tasks, and those of ``test_dev``, of ``test_dev_500`` and ``test`` if the folder has them."""
    train_files, validation_files = loader.find_files(folder)
    found = {name: file for name in loader.SPLITS for file in loader.split_file(folder, name)}
    files = {"test_dev": found.get("test_dev") or found.get("dev") or validation_files[0]}
    files |= {name: found[name] for name in ("test_dev_500", "test") if name in found}
    splits = {name: loader.read_tasks([file], folder, test=True) for name, file in files.items()}
    return loader.read_tasks(train_files, folder), splits


def _database_path(task: Task) -> str:
    """The place of the task's database in the output: in the folder that has it in the source."""
    folder = "test_database" if Path(task["db_path"]).parts[-3:-2] == ("test_database",) else "database"
    return f"{folder}/{task['db_id']}/{task['db_id']}.sqlite"


def _sample(tasks: list[Task]) -> list[Task]:
    """The ``SAMPLE`` tasks with the lowest hashes of their ids, which depend on neither order nor Python version."""
    by_hash = sorted(tasks, key=lambda task: hashlib.sha256(task["id"].encode()).digest())
    chosen = {task["id"] for task in by_hash[:SAMPLE]}
    return [task for task in tasks if task["id"] in chosen]


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


if __name__ == "__main__":
    app()
