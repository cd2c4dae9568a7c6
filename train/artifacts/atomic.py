"""Files that are either complete or absent, also after a crash of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_write", "sync"]


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces ``path`` at the end. After an error the old file stays."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        sync(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


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
