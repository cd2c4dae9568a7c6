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

from groundwire.tools.sql import DatabaseError, QueryError, file_problem, has_suffix
from groundwire.tools.text import first_of, printable, with_reasons

_NAMES_IN_ERROR = 20
_CHARS_IN_ERROR = 100


def database_names(folder: str | Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The SQLite files under ``folder`` by name, sorted, without hidden files and folders.

    And the other files with the suffix of a database, with what is wrong with each.
    """
    root, inside, skipped = Path(folder).resolve(), dict[Path, Path](), dict[str, str]()
    for path in _visible_files(Path(folder)):
        place = path.relative_to(folder)
        problem = file_problem(path) or ("" if _is_inside(path, root) else "it is a link out of the folder")
        if not problem:
            inside[path] = place
        elif has_suffix(path):
            skipped[_shown(place)] = problem
    taken = Counter(name for place in inside.values() for name in {_short_name(place), _shown(place)})
    names = {
        path: _short_name(place) if taken[_short_name(place)] == 1 else _shown(place) for path, place in inside.items()
    }
    return dict(sorted((name, path) for path, name in names.items())), skipped


def _visible_files(folder: Path) -> list[Path]:
    files = list[Path]()
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    return files


def _is_inside(path: Path, root: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(root)  # unlike Path.resolve, also for links in a circle


def _short_name(inside: Path) -> str:
    """``a/b.sqlite`` is a/b; ``a/a.sqlite`` is a."""
    name = inside.with_suffix("")
    return _shown(name.parent if name.parent.name == name.name else name)


def _shown(inside: Path) -> str:
    """A name that can be sent: a file's name may be no Unicode."""
    return printable(inside.as_posix())


class UnknownDatabaseError(QueryError):
    """No database has this name; the agent can choose another."""


class Databases:
    """One SQLite file, or those of a folder. Raises :class:`groundwire.tools.sql.DatabaseError` if there is none."""

    def __init__(self, path: str | Path) -> None:
        self.root = Path(path).absolute()
        self.is_folder = self.root.is_dir()
        self._files: dict[str, Path] = {}
        self._skipped: dict[str, str] = {}
        shown = printable(str(path))
        if self.is_folder:
            if not self.names():
                problems = f"no SQLite database in {shown} or its folders", self.not_served()
                raise DatabaseError(". ".join(filter(None, problems)))
        elif not os.path.lexists(self.root):
            raise DatabaseError(f"no database at {shown}")
        elif problem := file_problem(self.root):
            raise DatabaseError(f"{shown} cannot be served: {problem}")

    def names(self) -> list[str]:
        """The current names."""
        if not self.is_folder:
            return [printable(self.root.stem)]
        by_name, self._skipped = database_names(self.root)
        self._files = {_shown(path.relative_to(self.root)): path for path in by_name.values()} | by_name
        return list(by_name)

    def not_served(self) -> str:
        """The files of :meth:`names` that have the suffix of a database and are left out, and why; else empty."""
        return f"Not served: {with_reasons(self._skipped)}" if self._skipped else ""

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
        name = f"{name[:_CHARS_IN_ERROR]}..." if len(name) > _CHARS_IN_ERROR else name
        return f"no database {name!r}. Databases: {first_of(near, _NAMES_IN_ERROR)}"
