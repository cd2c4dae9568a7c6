"""Temporary folders that are removed even if their process is killed: the next process with one removes them."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["TemporaryFolder"]

_LOCK, _UNLOCKED = ".lock", ".unlocked"


class TemporaryFolder:
    """An empty folder whose name begins with ``prefix``; it exists until :meth:`remove` or the end of the process.

    Removes those of the same ``prefix`` whose processes were killed. Raises ``OSError`` if it cannot be made.
    """

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(prefix)
        self._folder = tempfile.TemporaryDirectory(prefix=prefix)
        self.path = Path(self._folder.name)
        # The file gets its final name with the lock, so no other process finds it without one.
        self._lock = (self.path / _UNLOCKED).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / _UNLOCKED).rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        self._folder.cleanup()
        self._lock.close()


def _remove_abandoned(prefix: str) -> None:
    """Remove the folders of ``prefix`` that no process uses: the end of a process frees its lock."""
    # Not Path.glob, which may raise for the folder of another user.
    for lock in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{prefix}*", _LOCK)):
        try:
            with open(lock, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.dirname(lock), ignore_errors=True)
        except OSError:  # in use, another user's, or removed meanwhile
            continue
