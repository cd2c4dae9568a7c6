"""The run directory. It stays consistent when the process is killed, and can be read while the run is active.

    runs/<time>-<backend>-<domain>/     and runs/latest, a link to the newest run that has rollouts
        config.json                     the resolved settings
        metrics.jsonl                   one line per step; line 0 is the validation before training
        rollouts/step-00012-train.parquet   the rollouts of a step; merged into rollouts.parquet at the end
        checkpoints/step-00012/         a transformers model and the optimizer's state
        checkpoints/best/               the model with the best validation
        curve.png, summary.json
        .lock                           locked by the process that writes to the folder

A step writes its rollouts, then its metrics, then its checkpoint, each atomically. Only a checkpoint completes a step:
a resumed run deletes everything after the newest checkpoint and repeats it. Nothing is written with a secret that
:mod:`groundwire.tools.secrets` knows.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from groundwire.tools.errors import UserError
from groundwire.tools.files import parse_json, read_bytes, read_json, shorten_repr
from groundwire.tools.secrets import masked_values
from groundwire.train.artifacts.checkpoints import Checkpoints, append_line, atomic_write, step_number
from groundwire.train.artifacts.metrics_lines import add_lost_runners, check_names, line_error
from groundwire.train.config.run_config import RunConfig
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.rows import COLUMNS, from_row, missing_column, row_error, to_row

_FORMAT = 3
"""Version of a run directory's files, as ``format`` in config.json. Raise it when older ones can no longer be read."""
LAST_RUN = "runs/latest"
"""The newest run of the folder that runs are written to by default."""
_TABLES = ("judge", "verl", "evaluation", "objects", "parts")
"""Tables in config.json."""
_MAX_METRICS = 1 << 30
"""Size of the largest ``metrics.jsonl`` that is read: half a million steps."""


class RunDirError(UserError):
    """A run directory cannot be used: it does not exist, is no run, or is in use."""


class RunDamagedError(RunDirError):
    """A file of the run cannot be read; the message names it."""

    exit_code = 1


def run_dirs(incomplete: str) -> list[str]:
    """The runs in ``runs``, the newest first."""
    folder = Path(LAST_RUN).parent
    found = sorted((str(file.parent) for file in folder.glob("*/config.json")), reverse=True)
    return [name for name in found if name.startswith(incomplete)]


class RunDir:
    """The files of the run in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._created = False

    @classmethod
    def create(cls, root: str | Path, *, backend: str, domain: str, config: Mapping[str, Any]) -> RunDir:
        """A new run directory under ``root`` with its settings."""
        run = cls(new_folder(root, f"{backend}-{domain}"))
        run._created = True
        run.write_config(config)
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run. Raises :class:`RunDirError` if it is no run, or another version of groundwire wrote it."""
        folder = Path(os.path.realpath(path))  # Path.resolve() has its own error for a link to itself
        if not (folder / "config.json").is_file():
            reason = "it has no config.json" if folder.is_dir() else "there is no such folder"
            remedy = "Give the folder of a run, which it printed at its end"
            remedy += ", or begin with groundwire train" if str(path) == LAST_RUN else ""
            raise RunDirError(f"{path} is not a run: {reason}. {remedy}")
        run = cls(folder)
        run.config()
        return run

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run against other processes. At the end, a folder that this object created is deleted if empty.

        Raises :class:`RunDirError` if another process has locked the run, and as :meth:`check_links`.
        """
        self.check_links()
        lock = self.path / ".lock"
        if lock.exists() and not lock.is_file():
            raise RunDirError(f"{lock} is not a regular file: delete it")
        with open(lock, "a+") as file:
            try:
                # A POSIX lock, not flock: forked children do not inherit it, so a child that outlives this process
                # does not block --resume. This process must not open the file a second time: closing it unlocks.
                import fcntl

                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # a system without such locks
                pass
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    file.seek(0)
                    owner = file.read().strip() or "another process"
                    raise RunDirError(f"{self.path} is in use by {owner}: wait until it ends, or stop it") from None
                # other errors: the file system has no locks, and the run goes on without one
            with suppress(OSError):  # a full disk
                file.truncate(0)
                os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}\n".encode())
            try:
                yield
            finally:
                if self._created and self.is_empty():
                    shutil.rmtree(self.path, ignore_errors=True)

    def check_links(self) -> None:
        """Raise :class:`RunDirError` for a link out of the folder. To be called before the run is changed."""
        for path in self.path.rglob("*"):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(self.path.resolve()):
                problem = f"{path} is a link out of the run, to {os.readlink(path)}, where files would be changed"
                raise RunDirError(f"{problem} and deleted: put a copy in its place")

    def is_empty(self) -> bool:
        """Whether the run has no results yet: only its settings, and with verl the tasks."""
        inputs = ("config.json", ".lock", "tasks")
        results = [path for path in self.path.iterdir() if path.name not in inputs]
        files = (file for path in results for file in (path, *path.rglob("*")))
        return not any(file.stat().st_size for file in files if file.is_file())

    def has_final_files(self) -> bool:
        """Whether ``curve.png``, the last file that is written, is newer than the metrics."""
        try:
            return (self.path / "curve.png").stat().st_mtime >= (self.path / "metrics.jsonl").stat().st_mtime
        except FileNotFoundError:
            return False

    @property
    def resources_id(self) -> str:
        """The run's id in a store that several runs share; a resumed run keeps it."""
        return f"rs-{hashlib.sha256(f'{platform.node()}:{self.path.resolve()}'.encode()).hexdigest()[:12]}"

    def config(self, step: int | None = None) -> dict[str, Any]:
        """The run's settings: the latest, or those of a ``step`` if it was resumed with others after it.

        Raises :class:`RunDamagedError`, and :class:`RunDirError` for a folder of another version.
        """
        file = self.path / "config.json"
        try:
            config = read_json(file, unique=True)
            if not isinstance(config, dict):
                raise ValueError("it holds no settings")
            self._check_format(config)
            for earlier in reversed(config.get("earlier", [])):
                if step is not None and step <= earlier["last_step"]:
                    config |= earlier["settings"]
            for name in sorted(config.keys() & RunConfig.model_fields.keys() - {*_TABLES}):
                RunConfig.check_value(name, config[name])
            for name in _TABLES:
                if not isinstance(table := config.get(name, {}), dict):
                    raise ValueError(f"{name} is {shorten_repr(table)}; it must be a table")
        except RunDirError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, UserError) as error:
            raise RunDamagedError(f"{file} is damaged ({error}): restore it, or start a new run") from error
        return config

    def _check_format(self, config: dict[str, Any]) -> None:
        """Take the version of the format out of ``config``. Raises :class:`RunDirError` for another one."""
        if "sft" in config:
            raise RunDirError(
                f"{self.path} is a run of groundwire sft, which has no rollouts: evaluate its model with groundwire "
                f"evaluate --model {self.path}"
            )
        if (version := config.pop("format", None)) != _FORMAT:
            older = version is None or (isinstance(version, int) and version < _FORMAT)
            raise RunDirError(
                f"{self.path} was written by {'an older' if older else 'another'} version of groundwire (format "
                f"{shorten_repr(version or 0)}, this version reads {_FORMAT}): start a new run, or use that version"
            )

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the settings of the run."""
        self.write_json("config.json", {"format": _FORMAT, **config})

    def change_config(self, former: Mapping[str, Any], changed: Mapping[str, Any], *, steps: int) -> None:
        """Store the values with which the run goes on, and the ``former`` ones for its steps so far."""
        stored, last = read_json(self.path / "config.json"), self.checkpoints.last_step()
        if changed:  # the steps after the last checkpoint are repeated
            earlier = [{**part, "last_step": min(part["last_step"], last)} for part in stored.get("earlier", [])]
            stored |= {**changed, "earlier": [*earlier, {"last_step": last, "settings": former}]}
        self.write_json("config.json", {**stored, "steps": steps})

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file atomically."""
        with atomic_write(self.path / name) as file:
            file.write_text(json.dumps(masked_values(value), indent=2, ensure_ascii=False) + "\n")

    def write_json_lines(self, name: str, values: Iterable[Mapping[str, Any]]) -> None:
        """Write a file of JSON lines atomically."""
        with atomic_write(self.path / name) as file:
            file.write_text("".join(f"{_json_line(value)}\n" for value in values))

    # -- metrics

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``. Raises ``ValueError`` for a key that is not declared."""
        check_names(line)
        append_line(self.path / "metrics.jsonl", _json_line(line))

    def write_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write ``metrics.jsonl`` anew. Raises ``ValueError`` for a key that is not declared."""
        for line in lines:
            check_names(line)
        self.write_json_lines("metrics.jsonl", lines)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, without a last line that is incomplete because the process was killed.

        Raises :class:`RunDamagedError` if any other line cannot be read: without it a step would seem not done.
        """
        file = self.path / "metrics.jsonl"
        try:
            *texts, incomplete = read_bytes(file, max_bytes=_MAX_METRICS).split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunDamagedError(f"{file} cannot be read ({error.strerror}): restore the file") from error
        lines = []
        for number, text in enumerate([*texts, incomplete], 1):
            try:
                line = parse_json(text)
                problem = line_error(line)
            except ValueError as error:
                problem = str(error)
            if not problem:
                lines.append(line)
            elif number <= len(texts):
                raise RunDamagedError(f"{file}, line {number} cannot be read ({problem}): restore the file")
        return lines

    def append_rollout_metrics(self, line: Mapping[str, Any]) -> None:
        """Add one line to ``rollouts.jsonl``: our part of a step's metrics, and the ``partition`` of its rollouts."""
        check_names({name: value for name, value in line.items() if name != "partition"})
        append_line(self.path / "rollouts.jsonl", _json_line(line))

    def rewind(self) -> int:
        """Delete what was written after the newest checkpoint; returns its step, 0 without one. Lost runners count."""
        step, lines = self.checkpoints.last_step(), self.metrics()
        lost = sum(line.get("runners_lost", 0) for line in lines if line["step"] > step)
        kept = add_lost_runners([line for line in lines if line["step"] <= step], lost)
        self.write_json_lines("metrics.jsonl", kept)
        for file in self._rollout_files():
            if (step_number(file) or 0) > step:
                file.unlink()
        return step

    # -- rollouts

    def write_rollouts(
        self, step: int, rollouts: Sequence[Rollout], *, kind: str = "train", append: bool = False
    ) -> None:
        """Write the rollouts of one step (``kind``: train or val), or ``append`` them to those already written."""
        self.write_rows(step, [to_row(rollout) for rollout in rollouts], kind=kind, append=append)

    def write_rows(
        self, step: int, rows: Sequence[Mapping[str, Any]], *, kind: str = "train", append: bool = False
    ) -> None:
        """As :meth:`write_rollouts`, of rows as :func:`groundwire.train.store.rows.to_row` makes them."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.path / "rollouts" / f"step-{step:05d}-{kind}.parquet"
        path.parent.mkdir(exist_ok=True)
        first = not self._rollout_files()
        table = pa.Table.from_pylist(masked_values(rows))
        if append and path.exists():
            table = pa.concat_tables([pq.read_table(path), table], promote_options="permissive")
        with atomic_write(path) as file:
            pq.write_table(table, file, compression="zstd")
        if first:
            self._link_latest()

    def merge_rollouts(self) -> list[str]:
        """Merge the rollouts of all steps into ``rollouts.parquet``, one row group per step.

        Returns a message for each file that cannot be read; the merged file lacks its rollouts.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        unreadable: list[str] = []
        schema, files = pa.schema([]), []
        for file in self._rollout_files():
            try:
                schema = pa.unify_schemas([schema, pq.read_schema(file)], promote_options="permissive")
                files.append(file)
            except (pa.ArrowException, OSError) as error:
                unreadable.append(_unreadable_message(file, error))
        if not files:
            return unreadable
        with (
            atomic_write(self.path / "rollouts.parquet") as merged,
            pq.ParquetWriter(merged, schema, compression="zstd") as writer,
        ):
            for file in files:
                try:
                    table = pq.read_table(file)
                except (pa.ArrowException, OSError) as error:
                    unreadable.append(_unreadable_message(file, error))
                    continue
                # All columns of the schema: those that the table lacks are null.
                writer.write_table(pa.concat_tables([schema.empty_table(), table], promote_options="permissive"))
        return unreadable

    def rollouts(self, columns: Collection[str] | None = None) -> tuple[list[Rollout], list[str]]:
        """All rollouts, and a message for each file that cannot be read, as :meth:`rollout_batches` reads them.

        Raises :class:`RunDirError` if there are no rollouts.
        """
        unreadable: list[str] = []
        rollouts = [rollout for batch in self.rollout_batches(columns, unreadable) for rollout in batch]
        if not rollouts:
            reason = unreadable[0] if unreadable else "it has not finished a step yet"
            raise (RunDamagedError if unreadable else RunDirError)(f"{self.path} has no rollouts: {reason}")
        return rollouts, unreadable

    def rollout_batches(self, columns: Collection[str] | None, unreadable: list[str]) -> Iterator[list[Rollout]]:
        """The rollouts of one step or validation at a time, since those of a long run do not fit into memory.

        Reads the files of the steps, else ``rollouts.parquet``; of a file these ``columns``, by default all. What is
        not read has its default in the record. A file cannot be read if it lacks a column that is not optional, or has
        a wrong value; a message for it is appended to ``unreadable``.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = COLUMNS if columns is None else columns
        merged = self.path / "rollouts.parquet"
        for path in self._rollout_files() or ([merged] if merged.is_file() else []):
            try:
                if path.exists() and not path.is_file():
                    raise ValueError("it is not a file")  # a pipe would have no end
                with suppress(FileNotFoundError), pq.ParquetFile(path) as file:  # a resumed run may delete it meanwhile
                    names = file.schema_arrow.names
                    if missing := missing_column(names, columns):
                        raise ValueError(missing)
                    present = [name for name in names if name in columns]
                    for group in range(file.num_row_groups):  # in the merged file: one per step
                        rows = file.read_row_group(group, columns=present).to_pylist()
                        if problem := row_error(rows):
                            raise ValueError(problem)
                        if rows:
                            yield [from_row(row) for row in rows]
            except (pa.ArrowException, OSError, ValueError) as error:
                unreadable.append(_unreadable_message(path, error))

    def _rollout_files(self) -> list[Path]:
        return sorted((self.path / "rollouts").glob("step-*.parquet"))

    def _link_latest(self) -> None:
        link = self.path.with_name(f".latest-{os.getpid()}")
        with suppress(OSError):  # the file system may have no links
            link.symlink_to(self.path.name)
            link.replace(self.path.with_name("latest"))


def new_folder(root: str | Path, name: str) -> Path:
    """A new folder under ``root``: the time, ``name``, and a number if there is one. Raises :class:`RunDirError`."""
    first = path = Path(root, f"{datetime.now():%Y%m%d-%H%M%S}-{name}")
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = first.with_name(f"{first.name}-{number}")
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunDirError(f"no folder can be made in {root} ({reason}): give another --output-dir") from error


def _json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(masked_values(value), ensure_ascii=False)


def _unreadable_message(path: Path, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{path.name} cannot be read ({reason})"
