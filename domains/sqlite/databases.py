"""The SQLite files of a folder, by the names that questions give them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from groundwire.domains._databases import SUFFIXES
from groundwire.domains._readers import first_names
from groundwire.domains._types import DataError
from groundwire.tools.files import shorten_repr

__all__ = ["Database", "Databases"]


@dataclass(frozen=True)
class Database:
    """A SQLite file, and a name that no other of the folder has."""

    db_id: str
    path: str
    place: str
    """Its path in the folder."""


class Databases:
    """All SQLite files below ``folder``. Raises :class:`DataError` if there are none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        if not files:
            raise DataError(f"{folder} has no SQLite file ({', '.join(SUFFIXES)}); add the databases.")
        stems = Counter(path.stem for path in files)
        self._by_name: dict[str, list[Database]] = {}
        for path in files:
            place = path.relative_to(folder)
            unique = path.stem if stems[path.stem] == 1 else "-".join(place.parts)
            database = Database(unique, str(path.resolve()), place.as_posix())
            for name in {database.place, path.name, path.stem}:
                self._by_name.setdefault(name, []).append(database)
        self.all = list({each.path: each for found in self._by_name.values() for each in found}.values())

    def find(self, name: str | None, where: str) -> Database:
        """The database that the row ``where`` names: its path in the folder, its file's name, with or without suffix.

        Without a name it is the only database. Raises :class:`DataError`.
        """
        if not name:
            if len(self.all) > 1:
                raise DataError(f"{where} names no database, and there are {len(self.all)}; add the column database.")
            return self.all[0]
        found = self._by_name.get(name, [])
        if len(found) == 1:
            return found[0]
        if found:
            paths = " and ".join(each.place for each in found)
            raise DataError(
                f"{where}: {len(found)} databases are called {shorten_repr(name)} ({paths}); give its path."
            )
        raise DataError(
            f"{where}: {self._folder} has no database {shorten_repr(name)}; it has "
            f"{first_names(each.db_id for each in self.all)}."
        )
