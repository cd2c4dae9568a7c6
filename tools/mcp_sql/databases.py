"""Which databases a server offers, and what each is called.

A name must mean the same file tomorrow, so it is made from the file's place in the folder: its relative path, which
always works, or that without the suffix and the doubled folder, ``<db>`` for Spider's ``<db>/<db>.sqlite``. Where two
files would share such a short name it stands for neither: a name may stop working, it never comes to mean another file.

Names are looked up in what was found under the folder and never made into paths, so none leads out of it.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from groundwire.tools.sql import DatabaseError, QueryError, is_sqlite

__all__ = ["Databases", "UnknownDatabaseError", "database_names"]

_NAMES_IN_ERROR = 20


def database_names(folder: str | Path) -> dict[str, Path]:
    """Every SQLite file under ``folder`` by its name, sorted. Hidden files and folders are left out."""
    inside = {path: path.relative_to(folder) for path in _files(Path(folder)) if is_sqlite(path)}
    taken = Counter(name for path in inside.values() for name in {_short(path), path.as_posix()})
    names = {path: _short(place) if taken[_short(place)] == 1 else place.as_posix() for path, place in inside.items()}
    return dict(sorted((name, path) for path, name in names.items()))


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return found


def _short(inside: Path) -> str:
    """``a/b.sqlite`` is a/b; ``a/a.sqlite`` is a."""
    name = inside.with_suffix("")
    return (name.parent if name.parent.name == name.name else name).as_posix()


class UnknownDatabaseError(QueryError):
    """There is no database of that name; the agent can choose another."""


class Databases:
    """One SQLite file, or those of a folder. Raises :class:`groundwire.tools.sql.DatabaseError` when there is none."""

    def __init__(self, path: str | Path) -> None:
        self.root = Path(path).absolute()
        self.is_folder = self.root.is_dir()
        if self.is_folder:
            if not self.names():
                raise DatabaseError(f"no SQLite database in {path} or its folders")
        elif not self.root.exists():
            raise DatabaseError(f"no database at {path}")
        elif not is_sqlite(self.root):
            raise DatabaseError(f"{path} is no SQLite database")
        self._known: dict[str, Path] = {} if self.is_folder else {self.root.stem: self.root}

    def names(self) -> list[str]:
        """The names, as they are now."""
        if self.is_folder:
            self._known = database_names(self.root)
        return list(self._known)

    def path(self, name: str | None = None) -> Path:
        """The file called ``name``; without a folder, the one file. Raises :class:`UnknownDatabaseError`."""
        if not self.is_folder:
            return self.root
        name = name or ""
        if name not in self._known:  # it may be new
            self.names()
        if name in self._known:
            return self._known[name]
        by_place = {path.relative_to(self.root).as_posix(): path for path in self._known.values()}
        if name in by_place:
            return by_place[name]
        raise UnknownDatabaseError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        names = list(self._known)
        near = [known for known in names if name.lower() in known.lower() or known.lower() in name.lower()] or names
        more = f" and {len(near) - _NAMES_IN_ERROR} more" if len(near) > _NAMES_IN_ERROR else ""
        return f"no database {name!r}. Databases: {', '.join(near[:_NAMES_IN_ERROR])}{more}"
