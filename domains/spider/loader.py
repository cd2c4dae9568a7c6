"""Read folders in Spider's shape, in either of two layouts.

The *published* layout is JSON (``dev.json``, ``train_spider.json``, ``train_others.json``). The *parquet* layout is the
one that ``groundwire prepare`` writes, and that others distribute. A folder with both is read as
parquet. If ``prepare`` wrote it, its ``report.json`` lists what was left out, and the golds are not run again. Without
that report (or ``gold_zero_rows.json``) the golds are run here, which takes some seconds for all of Spider.

Training validates on ``test_dev_500`` if that is there, as the published recipe does, else on ``test_dev`` or ``dev``.
Databases of validation and test tasks are looked for in ``test_database`` first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path, PurePosixPath

from platformdirs import user_cache_path
from pydantic import TypeAdapter

from groundwire.domains._readers import check_unique_ids, choose_folder, read_json
from groundwire.domains._readers import read_tasks as read_file
from groundwire.domains._types import DataError, Task
from groundwire.domains.spider.hardness import LEVELS, hardness
from groundwire.domains.text_to_sql.domain import Splits, SqlDomain, check_plain_name, set_database_paths
from groundwire.domains.text_to_sql.golds import NO_ROWS, Gold, GoldProblem, gold_of, leave_out
from groundwire.domains.text_to_sql.prepared_folder import REPORT
from groundwire.tools.files import first_error, read_bytes
from groundwire.tools.terminal import progress

CACHE = user_cache_path("groundwire", appauthor=False) / "spider"
_MAX_BYTES = 64 << 20
_MAX_STEPS = 10_000
"""Thousands of SQLite's virtual machine steps that a script may take: some seconds."""
_DENIED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}


def build(script: Path) -> Path:
    """The SQLite file that ``script`` makes, named after the script's folder.

    Raises :class:`DataError` if the script fails or makes no table.
    """
    db_id = script.parent.name
    try:
        text = read_bytes(script, max_bytes=_MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{script} cannot be read ({error}); copy or download it again.") from error
    # Named like its origin, which tells apart a database of both folders.
    folder = CACHE / hashlib.sha256(text.encode()).hexdigest()[:32] / script.parent.parent.name / db_id
    target = folder / f"{db_id}.sqlite"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            part = Path(name) / "part.sqlite"
            try:
                _run(text, part)
            except (sqlite3.Error, sqlite3.Warning) as error:
                remedy = f"repair it, or add {db_id}.sqlite"
                raise DataError(f"{script} makes no SQLite database: {error}; {remedy}.") from error
            os.replace(part, target)
    return target.resolve()


def _run(text: str, target: Path) -> None:
    """Run the script. It can reach no other file, and ends after a limit."""
    steps = iter(range(_MAX_STEPS))
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_DENY if action in _DENIED else sqlite3.SQLITE_OK)
        connection.set_progress_handler(lambda: next(steps, None) is None, 100_000)
        connection.executescript(text)
        if not connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]:
            raise sqlite3.DatabaseError("it creates no table")


BUNDLED = Path(__file__).parent / "bundled"
_DATABASE_FOLDERS = ("database", "test_database")
_ZERO_ROWS = "gold_zero_rows.json"
_ENVIRONMENT = ("SPIDER_DATA_DIR", "VERL_SPIDER_DATA_DIR")
# For each layout, all training files and the validation files, of which the first found is read.
_LAYOUTS = (
    (("train_spider.parquet",), ("test_dev_500.parquet", "test_dev.parquet", "dev.parquet")),
    (("train_spider.json", "train_others.json"), ("dev.json",)),
    (("generated_train.parquet",), ("generated_validation.parquet",)),  # the bundled data, nothing of which is Spider's
)
SPLITS = {
    "test_dev_500": ("test_dev_500.parquet",),
    "test_dev": ("test_dev.parquet", "generated_validation.parquet"),
    "dev": ("dev.parquet", "dev.json"),
    "test": ("test.parquet", "test.json"),
}
"""The names of the sets of questions besides training, and their files, of which the first found is read."""
FILES = {REPORT, _ZERO_ROWS, *(name for layout in _LAYOUTS for names in layout for name in names)}
FILES |= {name for names in SPLITS.values() for name in names}
_SAMPLE = 500
"""Questions of ``test_dev_500``, where the data has none."""
_IDS = TypeAdapter(list[str])
_TEXTS = ("db_path", "hardness")
# Each gold again, as tokens and as a parse tree: ten times the bytes.
_DROPPED_COLUMNS = ("query_toks", "query_toks_no_value", "question_toks", "sql")


class SpiderDomain(SqlDomain):
    """Text-to-SQL. A task has id, db_id, question, query, db_path (absolute), hardness, and its row's other columns.

    The splits besides ``train`` are the names in :data:`SPLITS`.
    """

    name = "spider"
    gold_columns = ("query", "hardness", *_DROPPED_COLUMNS)
    breakdowns = {
        "hardness": {level: level for level in LEVELS},
        "subject_split": {"familiar": "familiar subjects", "new": "new subjects"},
    }
    bundled = BUNDLED

    def folder(self, data_dir: str | None, option: str = "--data-dir") -> tuple[Path, str]:
        """``data_dir``, else ``SPIDER_DATA_DIR`` or ``VERL_SPIDER_DATA_DIR``, else the bundled data."""
        return choose_folder(data_dir, bundled=BUNDLED, bundled_is="generated", env=_ENVIRONMENT)

    def read(self, folder: Path, split: str = "") -> Splits:
        """The tasks for training, and those of ``split``, as the split ``validation``.

        For :meth:`prepare` they are those of ``test_dev``, and there are ``test_dev_500`` and ``test``, if the folder
        has them.
        """
        (train_files, [validation]), files = find_files(folder), _split_files(folder)
        parts = {"validation": validation}
        if not split:
            parts = {"validation": files.get("test_dev") or files.get("dev") or validation}
            parts |= {name: files[name] for name in ("test_dev_500", "test") if name in files}
        elif split != "validation":
            if split not in files:
                others = (f"{name} ({SPLITS[name][0]})" for name in SPLITS if name not in files)
                raise DataError(
                    f"{folder} has no split {split!r}; it has {', '.join(['train', *files])}. "
                    f"Others would be {', '.join(others)}."
                )
            parts = {"validation": files[split]}
        tasks = {name: read_tasks([file], folder, test=True) for name, file in parts.items()}
        note = f" of {parts['validation'].name}" if len(files) > 1 else ""
        return Splits({"train": read_tasks(train_files, folder), **tasks}, note)

    def split_name(self, split: str, splits: Splits) -> str:
        """The one that :meth:`read` has read."""
        return "validation"

    def listed_problems(
        self, folder: Path, train: list[Task], validation: list[Task]
    ) -> Mapping[Gold, GoldProblem] | None:
        """The golds whose ids ``gold_zero_rows.json`` lists for ``train`` and ``dev``, or None without that file."""
        if not (folder / _ZERO_ROWS).is_file():
            return None
        listed = read_json(folder / _ZERO_ROWS)
        if not isinstance(listed, dict):
            raise DataError(f"{folder / _ZERO_ROWS} holds a {type(listed).__name__}, not ids by split; remove it.")
        problems = {}
        for name, tasks in {"train": train, "dev": validation}.items():
            if problem := first_error(_IDS, listed.get(name, [])):
                raise DataError(f"{folder / _ZERO_ROWS}, {name}: {problem}; remove the file.")
            ids = set(listed.get(name, ()))
            problems.update({gold_of(task): GoldProblem(NO_ROWS) for task in tasks if task["id"] in ids})
        return problems

    written_by = "groundwire.domains.spider.prepare"

    def unpacked(self, source: Path, staging: Path | None) -> Path:
        """The folder with the data of ``source``, a folder or the published zip, which is unpacked into ``staging``."""
        if not source.exists():
            raise DataError(f"--source {source} does not exist; name a Spider folder or its zip.")
        if not source.is_dir() and not source.is_file():
            raise DataError(f"--source {source} is neither a folder nor a file; name a Spider folder or its zip.")
        if staging is None:
            return source
        folder = source if source.is_dir() else _extract(source, staging / "source")
        for candidate in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):  # as in the zip
            with suppress(DataError):
                find_files(candidate)
                return candidate
        return folder

    def files(
        self, splits: Splits, problems: Mapping[Gold, GoldProblem]
    ) -> tuple[Mapping[str, list[Task]], dict[str, int]]:
        """``train_spider``, ``test_dev``, ``test_dev_500`` (the source's own, else a sample), and ``test``."""
        tasks = splits.tasks
        kept, judged, left_out = leave_out(tasks["train"], tasks["validation"], problems)
        # Those with the lowest hashes of their ids, which depend on neither order nor Python version.
        by_hash = sorted(judged, key=lambda task: hashlib.sha256(task["id"].encode()).digest())
        chosen = {task["id"] for task in by_hash[:_SAMPLE]}
        sample = [task for task in judged if task["id"] in chosen]
        written = {"train_spider": kept, "test_dev": judged, "test_dev_500": sample}
        for name in [name for name in tasks if name not in ("train", "validation")]:
            written[name] = leave_out([], tasks[name], problems)[1]
        return written, left_out

    def place(self, task: Task) -> str:
        """A database's place in a prepared folder: in the folder that has it in the source."""
        folder = "test_database" if Path(task["db_path"]).parts[-3:-2] == ("test_database",) else "database"
        return f"{folder}/{task['db_id']}/{task['db_id']}.sqlite"

    def database_folders(self, data_dir: str | None = None) -> list[Path]:
        """The folder of the data, those of its databases, which may be links, and the databases made of scripts."""
        folder, _ = self.folder(data_dir)
        scripts = [script for name in _DATABASE_FOLDERS for script in (folder / name).glob("*/schema.sql")]
        built = [build(script) for script in scripts if _file_in(script.parent) is None]
        return [folder, *(folder / name for name in _DATABASE_FOLDERS), *built]


domain = SpiderDomain()


def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The training files and the validation files of ``folder``. Raises :class:`DataError` if a part is missing."""
    for train_names, validation_names in _LAYOUTS:
        train, validation = _existing(folder, train_names), _existing(folder, validation_names)[:1]
        if train and validation:
            return train, validation
    wanted = "; or ".join(f"{' or '.join(train)} with {' or '.join(validation)}" for train, validation in _LAYOUTS[:2])
    raise DataError(f"{folder} is no Spider folder: looked for {wanted}. Name the folder that holds these files.")


def _split_files(folder: Path) -> dict[str, Path]:
    """The files of the splits that ``folder`` has, besides ``train``."""
    return {name: file for name, names in SPLITS.items() for file in _existing(folder, names)[:1]}


def _existing(folder: Path, names: Iterable[str]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()]


def read_tasks(files: Iterable[Path], folder: Path, *, test: bool = False) -> list[Task]:
    """The tasks of ``files``, with their databases under ``folder``: those of ``test`` tasks in test_database first.

    Raises :class:`DataError`.
    """
    tasks = [
        task
        for file in files
        for task in read_file(file, text_columns=("question", "query", "db_id"), optional_columns=_TEXTS)
    ]
    check_unique_ids(tasks, folder)
    for task in tasks:
        for column in _DROPPED_COLUMNS:
            task.pop(column, None)
        task["hardness"] = task.get("hardness") or hardness(task["query"])
    names = _DATABASE_FOLDERS[::-1] if test else _DATABASE_FOLDERS
    places = " and ".join(str(folder / name) for name in names)
    looked_for = f"<db_id>/<db_id>.sqlite, .db and <db_id>/schema.sql under {places}; add them, or remove their tasks"
    find = partial(_find_database, folder=folder, names=names)
    set_database_paths(tasks, find, "", "copy or download them again", looked_for)
    return list(tasks)


def _find_database(db_id: str, db_path: str, folder: Path, names: Sequence[str]) -> Path | None:
    """The task's own ``db_path`` if that file exists, else the file or the script at the place of the layout."""
    check_plain_name(db_id, folder, db_path)
    if db_path and (folder / db_path).is_file():  # an absolute db_path stays as it is
        return (folder / db_path).resolve()
    places = [folder / name / db_id for name in names]
    if found := next((file for place in places if (file := _file_in(place))), None):
        return found.resolve()
    script = next((file for place in places if (file := place / "schema.sql").is_file()), None)
    return None if script is None else build(script)


def _file_in(place: Path) -> Path | None:
    """The database's file in the folder that has its name."""
    files = [place / f"{place.name}{suffix}" for suffix in (".sqlite", ".db")]
    return next((file for file in files if file.is_file()), None)


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
    return member.name in FILES or (is_database and "__MACOSX" not in member.parts)
