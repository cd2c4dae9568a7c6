"""Files and folders that are either complete or absent, also after a crash of the machine.

Of a run these are its checkpoints: ``step-00012/`` and so on, and ``best/``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from groundwire.tools.files import read_bytes, read_json

_KEPT = 2
_DISK_FULL_BYTES = 8 << 20
"""A failed write with less free space than this is reported as a full disk."""
_VALIDATION = "validation.json"
_FIGURES = {"step": int, "accuracy": float, "n": int, "total": int, "scores": dict}


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces ``path`` at the end. After an error the old file stays."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        yield part
        sync(part)
        part.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file and flush it to the disk. After an error the file is as it was, without a part of it."""
    with open(path, "ab", buffering=0) as file:
        end, rest = file.tell(), memoryview(f"{line}\n".encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)
            with suppress(OSError):
                file.truncate(end)
            raise


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk: without it a crash can leave the final name on an incomplete file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


class Checkpoints:
    """The checkpoints in ``folder``, which the local trainer or verl writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """A temporary folder to fill; renamed at the end. All but the newest two checkpoints are then deleted."""
        with self.write_folder(f"step-{step:05d}") as part:
            yield part
        for old in self.paths()[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def write_best(self, step: int, validation: Mapping[str, Any]) -> Iterator[Path]:
        """Likewise for the model with the best validation so far, which replaces the earlier one."""
        with self.write_folder("best") as part:
            yield part
            figures = {**validation, "step": step}
            (part / _VALIDATION).write_text(json.dumps({name: figures[name] for name in _FIGURES}) + "\n")

    def best(self) -> dict[str, Any] | None:
        """The ``step`` of the best model, with the ``accuracy``, ``n`` and ``total`` of its validation and the
        ``scores`` of its questions by task id; None without one.
        """
        with suppress(OSError, ValueError, LookupError, TypeError):  # a damaged file counts as none
            figures = read_json(self.folder / "best" / _VALIDATION)
            return {name: kind(figures[name]) for name, kind in _FIGURES.items()}
        return None

    @contextmanager
    def write_folder(self, name: str) -> Iterator[Path]:
        """A temporary folder that becomes ``name`` at the end, in place of an earlier one.

        A full disk is the usual ``OSError``: torch and safetensors have their own.
        """
        self.folder.mkdir(exist_ok=True)
        part = self.folder / f".{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            yield part
            for file in (*part.rglob("*"), part):
                sync(file)
            final = self.folder / name
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            sync(self.folder)
        except BaseException as error:
            is_full = isinstance(error, Exception) and shutil.disk_usage(part).free < _DISK_FULL_BYTES
            shutil.rmtree(part, ignore_errors=True)
            if is_full and not isinstance(error, OSError):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder)) from error
            raise

    def paths(self) -> list[Path]:
        """Complete checkpoints of the local trainer, oldest first."""
        numbered = [(step_number(path), path) for path in self.folder.glob("step-*") if path.is_dir()]
        return [path for _, path in sorted((step, path) for step, path in numbered if step is not None)]

    def last_step(self) -> int:
        """The step of the newest checkpoint, the local trainer's or verl's; 0 without one."""
        if paths := self.paths():
            return step_number(paths[-1]) or 0
        with suppress(OSError, ValueError):
            return int(read_bytes(self.folder / "latest_checkpointed_iteration.txt"))
        return 0

    def rename_damaged(self, checkpoint: Path) -> Path:
        """Rename an unreadable checkpoint to ``damaged-<name>``, which :meth:`paths` ignores. Returns the new path."""
        renamed = checkpoint.with_name(f"damaged-{checkpoint.name}")
        shutil.rmtree(renamed, ignore_errors=True)
        return checkpoint.rename(renamed)


def step_number(path: Path) -> int | None:
    """The number in a name like ``step-00012`` or ``step-00012-train.parquet``; None for any other name."""
    match = re.fullmatch(r"step-(\d+)(-.+\.parquet)?", path.name)
    return int(match[1]) if match else None
