"""Private copies of databases, for agents whose own tools could change them; and a check that originals are unchanged.

A copy belongs to one rollout at a time. If its agent left it unchanged, a later rollout gets it: it is copied once, its
path stays the same, and the agent's caches work. A database of more than 16 MB, without the holes of its file, has one
copy for all rollouts of the process, in read-only mode. An agent that runs as root can change it nevertheless; later
rollouts get a new copy.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from groundwire.tools.files import TemporaryFolder, copy_file, size_on_disk
from groundwire.tools.sql.opening import files_of, logs_of, signature
from groundwire.tools.text import first_of

_log = logging.getLogger(__name__)
_PREFIX = "groundwire-copies-"
_PRIVATE_BYTES = 16 << 20
_IDLE_BYTES = 256 << 20  # bytes of copies that are kept for later rollouts; the one that was used last is always kept
_State: TypeAlias = "tuple[tuple[int, ...] | None, ...]"


@dataclass(eq=False)
class DatabaseCopy:
    """A copy of ``original``, at ``path`` in a ``folder`` that nothing else uses."""

    original: str
    path: str
    folder: Path
    shared: bool
    size: int
    original_state: _State
    state: Mapping[str, tuple[int, ...]]
    users: int = 1


class DatabaseCopies:
    """Copies in a temporary folder, for any number of threads."""

    def __init__(self, *, private_bytes: int = _PRIVATE_BYTES, idle_bytes: int = _IDLE_BYTES) -> None:
        self._private_bytes, self._idle_bytes = private_bytes, idle_bytes
        self._lock, self._copying = threading.Lock(), threading.Lock()
        self._root: TemporaryFolder | None = None
        self._copies: list[DatabaseCopy] = []  # those for later rollouts, in the order of their last use
        self._warned: set[str] = set()
        self._originals: dict[str, _State] = {}

    def take(self, database: str) -> DatabaseCopy:
        """A copy that no other rollout uses, or the read-only one. Raises ``OSError`` if it cannot be made."""
        state = _state(database)
        if (copy := self._reuse(database, state)) is not None:
            return copy
        files = _files(database)
        size = sum(map(size_on_disk, files.values()))
        if size <= self._private_bytes:
            return self._make(database, state, files, size, shared=False)
        with self._copying:  # one thread copies a large file, and the others wait for it
            return self._reuse(database, state) or self._make(database, state, files, size, shared=True)

    def give_back(self, copy: DatabaseCopy, *, reusable: bool = True) -> None:
        """The rollout has ended. Not ``reusable``: its agent may still be running."""
        changed = _folder_state(copy.folder) != copy.state
        with self._lock:
            copy.users -= 1
            if changed and copy.original not in self._warned:
                self._warned.add(copy.original)
                _log.warning("an agent changed its copy of %s; the original is as it was", copy.original)
            if changed or not reusable or copy not in self._copies:
                self._forget(copy)
            else:
                self._copies.append(self._copies.pop(self._copies.index(copy)))
            idle = [other for other in self._copies if not other.users]
            while len(idle) > 1 and sum(other.size for other in idle) > self._idle_bytes:
                self._forget(idle.pop(0))

    def remember(self, databases: Iterable[str]) -> None:
        """Note the state of ``databases``, for :meth:`warning`; that of the others is noted at their first copy."""
        self._originals.update((path, _state(path)) for path in databases)

    def warning(self) -> str:
        """A message that names the databases that have changed since; empty if none has."""
        changed = [path for path, state in self._originals.items() if _state(path) != state]
        if not changed:
            return ""
        return (
            f"{len(changed)} of {len(self._originals)} databases were changed during the run ({first_of(changed, 3)}): "
            "rewards before and after the change cannot be compared. If a tool of the agent did it, have the tool open "
            "the task's database, which is a private copy, and no path of its own; then restore the files"
        )

    def close(self) -> None:
        """Remove all copies."""
        with self._lock:
            if self._root is not None:
                self._root.remove()
            self._root, self._copies = None, []

    def _reuse(self, database: str, state: _State) -> DatabaseCopy | None:
        with self._lock:
            for copy in [copy for copy in self._copies if copy.original == database]:
                if copy.original_state != state:
                    self._forget(copy)
                elif copy.shared or not copy.users:
                    copy.users += 1
                    return copy
            return None

    def _make(self, database: str, state: _State, files: Mapping[str, str], size: int, *, shared: bool) -> DatabaseCopy:
        with self._lock:
            self._root = self._root or TemporaryFolder(_PREFIX)
            self._originals.setdefault(database, state)
            folder = Path(tempfile.mkdtemp(dir=self._root.path))
        place = folder / (Path(database).parent.name or "database")
        place.mkdir()
        try:
            for name, file in files.items():
                copy_file(file, place / name)
                if shared:
                    (place / name).chmod(0o444)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        path = str(place / Path(database).name)
        copy = DatabaseCopy(database, path, folder, shared, size, state, _folder_state(folder))
        with self._lock:
            self._copies.append(copy)
        return copy

    def _forget(self, copy: DatabaseCopy) -> None:
        """Give the copy to no other rollout, and remove it when none uses it."""
        with suppress(ValueError):
            self._copies.remove(copy)
        if not copy.users:
            shutil.rmtree(copy.folder, ignore_errors=True)


def _state(path: str) -> _State:
    """The inode, time of modification and size of a database, and those of its logs."""
    return tuple(map(_signature, (path, *logs_of(path).values())))


def _signature(path: str) -> tuple[int, ...] | None:
    with suppress(OSError):
        return signature(path)
    return None


def _folder_state(folder: Path) -> dict[str, tuple[int, ...]]:
    return {
        file: state
        for root, _, names in os.walk(folder)
        for name in names
        if (state := _signature(file := os.path.join(root, name))) is not None
    }


def _files(database: str) -> dict[str, str]:
    """By the names of their copies: the database, its logs, and what describes it beside ``<db>/<db>.sqlite``."""
    path = Path(database)
    described = path.parent.iterdir() if path.parent.name == path.stem else ()
    files = {file.name: str(file) for file in described if file.is_file() and not file.name.endswith("-shm")}
    return {**files, **{path.name + end: file for end, file in files_of(database).items()}}
