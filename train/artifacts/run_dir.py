"""A run's folder: written so that a kill at any moment leaves it whole, and readable while the run goes on.

    runs/<time>-<backend>-<domain>/     and runs/latest, a link to the newest that has rollouts
        config.json                     the resolved settings
        metrics.jsonl                   one line a step; line 0 is the validation before training
        rollouts/step-00012.parquet     the rollouts of a step; merged into rollouts.parquet at the end
        checkpoints/step-00012/         what transformers loads, and the optimizer's state
        curve.png, summary.json
        .lock                           held by the process that writes here

A step is written in the order rollouts, metrics, checkpoint, each by renaming what is finished and on the disk. The
checkpoint is what makes a step count: on resuming, whatever lies beyond the newest one is dropped and done again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = ["RunDamagedError", "RunDir", "RunDirError"]

_FORMAT = 1
"""Version of a run folder's files, as ``format`` in config.json. Raise it when older folders can no longer be read."""


class RunDirError(Exception):
    """The run's folder cannot be used: not there, not a run, or in use.

    ``status`` is what a command ends with: 2 for what was typed, 1 for what broke.
    """

    status = 2


class RunDamagedError(RunDirError):
    """A file of the run cannot be read; the message names it."""

    status = 1


class RunDir:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created = False

    @classmethod
    def create(cls, root: str | Path, *, backend: str, domain: str, config: Mapping[str, Any]) -> RunDir:
        """A new folder under ``root`` with its settings; ``latest`` points at it once it has rollouts."""
        root = Path(root)
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{backend}-{domain}"
        for number in range(100):
            path = root / (name if number == 0 else f"{name}-{number + 1}")
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
        run = cls(path)
        run._created = True
        run.write_config(config)
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run. Raises :class:`RunDirError` if it is no run, or another version of groundwire wrote it."""
        folder = Path(path).resolve()
        if not (folder / "config.json").is_file():
            raise RunDirError(f"{path} is not a run: it has no config.json. Give a folder like runs/latest")
        run = cls(folder)
        run.config()
        return run

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it this process alone writes here. A folder that it made and has nothing to keep in goes away again.

        Raises :class:`RunDirError` where another process holds the run.
        """
        with open(self.path / ".lock", "a+") as file:
            try:
                # Of POSIX's locks, not flock's: a forked child does not share it, so that none can outlive this
                # process and keep the run from being resumed. No process may open the file a second time.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    file.seek(0)
                    who = file.read().strip() or "another process"
                    raise RunDirError(f"{self.path} is in use by {who}: wait until it has ended, or stop it") from None
                # a file system without locks still has the run
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            try:
                yield
            finally:
                if self._created and self.is_empty():
                    shutil.rmtree(self.path, ignore_errors=True)

    def is_empty(self) -> bool:
        """Whether nothing was done yet: there are only the settings, and with verl the tasks."""
        before = ("config.json", ".lock", "tasks")
        files = (file for each in self.path.iterdir() if each.name not in before for file in (each, *each.rglob("*")))
        return not any(file.stat().st_size for file in files if file.is_file())

    def is_concluded(self) -> bool:
        """Whether the files about all steps are there: the curve is the last that is written."""
        try:
            return (self.path / "curve.png").stat().st_mtime >= (self.path / "metrics.jsonl").stat().st_mtime
        except FileNotFoundError:
            return False

    def _be_latest(self) -> None:
        link = self.path.with_name(f".latest-{os.getpid()}")
        with suppress(OSError):  # a file system without links still has the run
            link.symlink_to(self.path.name)
            link.replace(self.path.with_name("latest"))

    @property
    def resources_id(self) -> str:
        """What a store shared with other runs knows this one by; a resumed run is the same one."""
        return f"rs-{hashlib.sha256(f'{platform.node()}:{self.path.resolve()}'.encode()).hexdigest()[:12]}"

    def config(self) -> dict[str, Any]:
        """The settings that the run was started with.

        Raises :class:`RunDamagedError`, and :class:`RunDirError` for a folder of another version.
        """
        file = self.path / "config.json"
        try:
            config = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise RunDamagedError(f"{file} is damaged ({error}): restore it, or start a new run") from error
        if not isinstance(config, dict):
            raise RunDamagedError(f"{file} is damaged (it holds no settings): restore it, or start a new run")
        if (version := config.pop("format", None)) != _FORMAT:
            writer = "an older" if version is None else "another"
            raise RunDirError(
                f"{self.path} was written by {writer} version of groundwire (format {version or 0}, this version reads "
                f"{_FORMAT}): start a new run, or use that version"
            )
        return config

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the settings of the run."""
        self.write_json("config.json", {"format": _FORMAT, **config})

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file in one piece."""
        with self.whole(self.path / name) as part:
            part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    # -- metrics

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``."""
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def amend_metrics(self, line: Mapping[str, Any]) -> None:
        """Write the last line anew: its validation was made up for."""
        lines = [*self.metrics()[:-1], line]
        with self.whole(self.path / "metrics.jsonl") as part:
            part.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines so far; a last line that a kill cut short is left out.

        Raises :class:`RunDamagedError` for any other that cannot be read: without it, a step would seem never done.
        """
        file = self.path / "metrics.jsonl"
        try:
            *texts, cut_short = file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        lines = []
        for number, text in enumerate([*texts, cut_short], 1):
            try:
                line = dict(json.loads(text))
                int(line["step"])
                lines.append(line)
            except (ValueError, TypeError, LookupError):
                if number <= len(texts):
                    raise RunDamagedError(f"{file}, line {number} cannot be read: restore the file") from None
        return lines

    def append_rollout_figures(self, line: Mapping[str, Any]) -> None:
        """Add one line to ``rollouts.jsonl``: what became of the rollouts of a step, where verl writes the metrics."""
        with open(self.path / "rollouts.jsonl", "a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    # -- rollouts

    def write_rollouts(
        self, step: int, rows: Sequence[Mapping[str, Any]], *, kind: str = "train", more: bool = False
    ) -> None:
        """Write the rollouts of one step (``kind``: train or val), or add ``more`` to those that are written."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.path / "rollouts" / f"step-{step:05d}-{kind}.parquet"
        path.parent.mkdir(exist_ok=True)
        first = not any(path.parent.glob("step-*.parquet"))
        table = pa.Table.from_pylist([dict(row) for row in rows])
        if more and path.exists():
            table = pa.concat_tables([pq.read_table(path), table], promote_options="permissive")
        with self.whole(path) as part:
            pq.write_table(table, part, compression="zstd")
        if first:
            self._be_latest()

    def merge_rollouts(self) -> list[str]:
        """Put the steps' rollouts into the one file ``rollouts.parquet``, a step at a time.

        Returns a sentence for each file that cannot be read and is left out.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        damaged: list[str] = []
        schemas = {}
        for part in sorted((self.path / "rollouts").glob("step-*.parquet")):
            try:
                schemas[part] = pq.read_schema(part)
            except (pa.ArrowException, OSError) as error:
                damaged.append(_unreadable(part, error))
        if not schemas:
            return damaged
        schema = pa.unify_schemas(list(schemas.values()), promote_options="permissive")
        with (
            self.whole(self.path / "rollouts.parquet") as whole,
            pq.ParquetWriter(whole, schema, compression="zstd") as out,
        ):
            for part in schemas:
                try:
                    with pq.ParquetFile(part) as file:
                        table = file.read()
                except (pa.ArrowException, OSError) as error:
                    damaged.append(_unreadable(part, error))
                    continue
                for field in schema:
                    if field.name not in table.column_names:
                        table = table.append_column(field.name, pa.nulls(len(table), field.type))
                out.write_table(table.select(schema.names).cast(schema))
        return damaged

    def rollouts(self, columns: Sequence[str] | None = None) -> tuple[list[dict[str, Any]], list[str]]:
        """The rollouts so far (all columns, or those named), and a sentence for each file that cannot be read.

        Raises :class:`RunDirError` where nothing can be read.
        """
        damaged: list[str] = []
        rows = [row for batch in self.rollout_batches(columns, damaged) for row in batch]
        if not rows:
            if damaged:
                raise RunDamagedError(f"{self.path} has no rollouts: {damaged[0]}")
            raise RunDirError(f"{self.path} has no rollouts: it has not finished a step yet")
        return rows, damaged

    def rollout_batches(self, columns: Sequence[str] | None, damaged: list[str]) -> Iterator[list[dict[str, Any]]]:
        """The rollouts so far, one step's or validation's at a time: a long run's do not all fit into memory.

        The steps' own files are read where there are any: they are there while the run goes on, too. A column that a
        file from an older version lacks is missing in its rows. ``damaged`` is given a sentence for each file that
        cannot be read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        whole = self.path / "rollouts.parquet"
        for path in sorted((self.path / "rollouts").glob("step-*.parquet")) or ([whole] if whole.is_file() else []):
            try:
                with suppress(FileNotFoundError), pq.ParquetFile(path) as file:  # one that resumes drops what it redoes
                    there = [name for name in file.schema_arrow.names if columns is None or name in columns]
                    for group in range(file.num_row_groups):  # in the whole file each is a step's
                        yield file.read_row_group(group, columns=there).to_pylist()
            except (pa.ArrowException, OSError) as error:
                damaged.append(_unreadable(path, error))

    # -- checkpoints

    @contextmanager
    def new_checkpoint(self, step: int, *, keep: int = 2) -> Iterator[Path]:
        """A folder to fill; it gets its name when it is complete, and all but the newest ``keep`` are removed."""
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        part = folder / f".step-{step:05d}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            yield part
            for file in (*part.rglob("*"), part):
                _sync(file)
            final = folder / f"step-{step:05d}"
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            _sync(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = (path for path in (self.path / "checkpoints").glob("step-*") if path.is_dir())
        return sorted((path for path in found if _step(path) is not None), key=lambda path: _step(path) or 0)

    def set_aside(self, checkpoint: Path) -> Path:
        """Give a checkpoint that cannot be read another name, under which it counts no more; that name."""
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
        shutil.rmtree(aside, ignore_errors=True)
        return checkpoint.rename(aside)

    def saved_step(self) -> int:
        """The step of the newest checkpoint, the local trainer's or verl's; 0 before the first."""
        if checkpoints := self.checkpoints():
            return _step(checkpoints[-1]) or 0
        with suppress(OSError, ValueError):
            return int((self.path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        return 0

    def rewind(self) -> int:
        """Drop what lies beyond the newest checkpoint; the number of the last step that counts (0 before the first)."""
        step = self.saved_step()
        kept = [line for line in self.metrics() if line["step"] <= step]
        with self.whole(self.path / "metrics.jsonl") as part:
            part.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        for part in (self.path / "rollouts").glob("step-*.parquet"):
            if (_step(part) or 0) > step:
                part.unlink()
        return step

    @contextmanager
    def whole(self, path: Path) -> Iterator[Path]:
        """A file that appears under its name only when it is complete, and leaves the old one if it is not."""
        part = path.with_name(f".{path.name}.part")
        try:
            yield part
            _sync(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _step(path: Path) -> int | None:
    """The number in a name like step-00012 or step-00012-train.parquet; None in a name of somebody else's."""
    found = re.fullmatch(r"step-(\d+)(-.+\.parquet)?", path.name)
    return int(found[1]) if found else None


def _sync(path: Path) -> None:
    """Have the disk hold it: else a crash of the machine may leave a final name over half a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # there are file systems that cannot do it with folders
            raise
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path.name} cannot be read ({str(error).splitlines()[0]})"
