"""Read folders in Spider's shape, in either of two layouts.

The *published* layout is JSON (``dev.json``, ``train_spider.json``, ``train_others.json``). The *parquet* layout is the
one that ``groundwire prepare`` writes, and that others distribute. A folder with both is read as
parquet. If ``prepare`` wrote it, its ``report.json`` lists what was left out, and the golds are not run again. Without
that report the golds are run here, which takes some seconds for all of Spider.

Training validates on ``test_dev_500`` if that is there, as the published recipe does, else on ``test_dev`` or ``dev``.
Databases of validation and test tasks are looked for in ``test_database`` first.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from groundwire.domains._readers import check_unique_ids, data_folder
from groundwire.domains._readers import read_tasks as read_file
from groundwire.domains._types import DataError, Task
from groundwire.domains.spider.hardness import LEVELS, hardness
from groundwire.domains.spider.schema_files import build
from groundwire.domains.text_to_sql.domain import Splits, SqlDomain, database_files, set_database_paths
from groundwire.domains.text_to_sql.golds import Gold, GoldProblem, leave_out
from groundwire.domains.text_to_sql.prepared_folder import REPORT
from groundwire.tools.sql import has_suffix
from groundwire.tools.terminal import progress

BUNDLED = Path(__file__).parent / "bundled"
_DATABASE_FOLDERS = ("database", "test_database")
_ENVIRONMENT = ("SPIDER_DATA_DIR", "VERL_SPIDER_DATA_DIR")
# All files of the first layout that is there are training data.
_TRAIN = (("train_spider.parquet",), ("train_spider.json", "train_others.json"), ("generated_train.parquet",))
SPLITS = {
    "test_dev_500": ("test_dev_500.parquet",),
    "test_dev": ("test_dev.parquet", "generated_validation.parquet"),
    "dev": ("dev.parquet", "dev.json"),
    "test": ("test.parquet", "test.json"),
}
"""The names of the sets of questions besides training, and their files, of which the first found is read. Training
validates on the first set of the folder."""
FILES = {REPORT, *(name for names in (*_TRAIN, *SPLITS.values()) for name in names)}
_MAX_LIST_BYTES, _MAX_RATIO, _SMALL_BYTES = 8 << 20, 100, 64 << 20
"""Of a zip: its list of members, some 100,000; its size unpacked by its own, and one that may be a larger multiple."""
_SAMPLE = 500  # questions of ``test_dev_500``, where the data has none
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
    content = "a Spider folder or its zip"

    def folder(self, data_dir: str | None, option: str = "--data-dir") -> tuple[Path, str]:
        """``data_dir``, else ``SPIDER_DATA_DIR`` or ``VERL_SPIDER_DATA_DIR``, else the bundled data."""
        return data_folder(data_dir, option, domain=self.name, content=self.content, bundled=BUNDLED, env=_ENVIRONMENT)

    def read(self, folder: Path, split: str = "") -> Splits:
        """The tasks for training, and those of ``split``.

        Without it, for :meth:`prepare`, ``validation`` is ``test_dev``, and there are ``test_dev_500`` and ``test``, if
        the folder has them.
        """
        train_files, files = find_files(folder)
        parts = {"validation": next(iter(files.values()))}
        if not split:
            parts = {"validation": files.get("test_dev") or files.get("dev") or parts["validation"]}
            parts |= {name: files[name] for name in ("test_dev_500", "test") if name in files}
        elif split != "validation":
            if split not in files:
                raise DataError(f"{folder} has no split {split!r}; it has {', '.join(['train', *files])}.")
            parts = {split: files[split]}
        tasks = {name: read_tasks([file], folder, test=True) for name, file in parts.items()}
        note = f" of {next(iter(parts.values())).name}" if len(files) > 1 else ""
        return Splits({"train": read_tasks(train_files, folder), **tasks}, note)

    written_by = "groundwire.domains.spider.prepare"

    def unpacked(self, source: Path, staging: Path) -> Path:
        """The folder with the data of ``source``, a folder or the published zip, which is unpacked into ``staging``."""
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
        places = [folder / name for name in _DATABASE_FOLDERS]
        scripts = [script for place in places for script in place.glob("*/schema.sql")]
        made = [build(script) for script in scripts if not any(map(Path.is_file, database_files(script.parent)))]
        return [folder, *places, *made]


domain = SpiderDomain()


def find_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The training files of ``folder``, and the file of each other split. Raises :class:`DataError` without them."""
    train: list[Path] = next(filter(None, (_existing(folder, names) for names in _TRAIN)), [])
    files = {name: file for name, names in SPLITS.items() for file in _existing(folder, names)[:1]}
    if not train or files.keys() <= {"test"}:
        raise DataError(
            f"{folder} is no Spider folder: looked for train_spider.parquet or train_spider.json, with "
            "test_dev_500.parquet, test_dev.parquet or dev.json. Name the folder that holds these files."
        )
    return train, files


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
    places = [folder / name for name in (_DATABASE_FOLDERS[::-1] if test else _DATABASE_FOLDERS)]
    set_database_paths(tasks, folder, places, remedy="copy or download them again, or remove their tasks", build=build)
    return list(tasks)


class _Archive(io.BufferedReader):
    """Reads pieces only: ``zipfile`` reads the list of members, of whatever size, at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size > _MAX_LIST_BYTES:
            raise zipfile.BadZipFile(f"its list of members is larger than {_MAX_LIST_BYTES >> 20} MB")
        return super().read(size)


def _extract(archive: Path, target: Path) -> Path:
    """Unpack the files that are read later, and nothing outside ``target``."""
    try:
        with _Archive(io.FileIO(archive)) as opened, zipfile.ZipFile(opened) as file:
            members = [member for member in file.infolist() if _is_wanted(archive, member)]
            _check_sizes(archive, sum(member.file_size for member in members), target)
            with progress("Unpacking", len(members)) as advance:
                for member in members:
                    file.extract(member, target)
                    advance()
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{archive} is not a readable zip ({error}); download it again.") from error
    target.mkdir(exist_ok=True)
    return target


def _check_sizes(archive: Path, size: int, target: Path) -> None:
    free, packed = shutil.disk_usage(target.parent).free, archive.stat().st_size
    if size > max(_MAX_RATIO * packed, _SMALL_BYTES):
        raise DataError(
            f"{archive} unpacks to {size / 1e6:,.0f} MB, more than {_MAX_RATIO} times its own size; do not trust it."
        )
    if size > free:
        place = target.parent.parent
        raise DataError(f"{archive} unpacks to {size / 1e6:,.0f} MB, and {place} has {free / 1e6:,.0f} MB; free some.")


def _is_wanted(archive: Path, member: zipfile.ZipInfo) -> bool:
    """Whether it is a file that is read. Raises :class:`DataError` for one that a published zip does not have."""
    path = PurePosixPath(member.filename)
    if path.is_absolute() or ".." in path.parts or "\\" in str(path):
        raise DataError(f"{archive} holds {str(path)!r}, which would be written outside its folder; do not trust it.")
    is_database = has_suffix(path) or path.name == "schema.sql"
    if member.is_dir() or not (path.name in FILES or (is_database and "__MACOSX" not in path.parts)):
        return False
    if stat.S_ISLNK(member.external_attr >> 16):
        raise DataError(f"{archive} holds the link {str(path)!r}; pack the file that it leads to.")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{archive} holds {str(path)!r} in a compression other than deflate; pack it again.")
    return True
