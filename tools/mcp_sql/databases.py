"""The databases of a server, and their names.

A name must always mean the same file, so it comes from the file's path in the folder. The relative path always works.
The short name is the path without suffix and doubled folder: ``<db>`` for Spider's ``<db>/<db>.sqlite``. A short name
that would fit two files is not used, so it may stop working but never means another file.

Names are looked up among the files found under the folder, never turned into paths, so no name leads out of it. A file
whose real path is outside of the folder, because of a symbolic link, is not served.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from groundwire.tools.sql import DatabaseError, QueryError, is_sqlite

_NAMES_IN_ERROR = 20
_CHARS_IN_ERROR = 100


def database_names(folder: str | Path) -> dict[str, Path]:
    """The SQLite files under ``folder`` by name, sorted, without hidden files and folders."""
    root = Path(folder).resolve()
    inside = {
        path: path.relative_to(folder)
        for path in _visible_files(Path(folder))
        if path.is_file() and _is_inside(path, root) and is_sqlite(path)
    }
    taken = Counter(name for path in inside.values() for name in {_short_name(path), path.as_posix()})
    names = {
        path: _short_name(place) if taken[_short_name(place)] == 1 else place.as_posix()
        for path, place in inside.items()
    }
    return dict(sorted((name, path) for path, name in names.items()))


def _visible_files(folder: Path) -> list[Path]:
    files = list[Path]()
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    return files


def _is_inside(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root)


def _short_name(inside: Path) -> str:
    """``a/b.sqlite`` is a/b; ``a/a.sqlite`` is a."""
    name = inside.with_suffix("")
    return (name.parent if name.parent.name == name.name else name).as_posix()


class UnknownDatabaseError(QueryError):
    """No database has this name; the agent can choose another."""


class Databases:
    """One SQLite file, or those of a folder. Raises :class:`groundwire.tools.sql.DatabaseError` if there is none."""

    def __init__(self, path: str | Path) -> None:
        self.root = Path(path).absolute()
        self.is_folder = self.root.is_dir()
        self._files: dict[str, Path] = {}
        if self.is_folder:
            if not self.names():
                raise DatabaseError(f"no SQLite database in {path} or its folders")
        elif not self.root.exists():
            raise DatabaseError(f"no database at {path}")
        elif not is_sqlite(self.root):
            raise DatabaseError(f"{path} is no SQLite database")

    def names(self) -> list[str]:
        """The current names."""
        if not self.is_folder:
            return [self.root.stem]
        by_name = database_names(self.root)
        self._files = {path.relative_to(self.root).as_posix(): path for path in by_name.values()} | by_name
        return list(by_name)

    def path(self, name: str | None = None) -> Path:
        """The file ``name``; always the one file if there is no folder. Raises :class:`UnknownDatabaseError`."""
        if not self.is_folder:
            return self.root
        name = name or ""
        if name not in self._files:
            self.names()  # it may be a new file
        file = self._files.get(name)
        if file is None or not _is_inside(file, self.root.resolve()):  # a link may have replaced the file
            raise UnknownDatabaseError(self._unknown(name))
        return file

    def _unknown(self, name: str) -> str:
        names = self.names()
        near = [known for known in names if name.lower() in known.lower() or known.lower() in name.lower()] or names
        more = f" and {len(near) - _NAMES_IN_ERROR} more" if len(near) > _NAMES_IN_ERROR else ""
        name = f"{name[:_CHARS_IN_ERROR]}..." if len(name) > _CHARS_IN_ERROR else name
        return f"no database {name!r}. Databases: {', '.join(near[:_NAMES_IN_ERROR])}{more}"
