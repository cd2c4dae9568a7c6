"""Databases that exist only as a script, ``schema.sql``: it is run once, into a file of the user's cache."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

from groundwire.domains._types import DataError
from groundwire.tools.files import read_bytes

__all__ = ["CACHE", "build"]

CACHE = user_cache_path("groundwire", appauthor=False) / "spider"
_MAX_BYTES = 64 << 20
_MAX_STEPS = 10_000
"""Thousands of SQLite's virtual machine steps that a script may take: some seconds."""
_DENIED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}


def build(script: Path) -> Path:
    """The SQLite file that ``script`` makes, named after the script's folder.

    Raises :class:`DataError` if the script fails or makes no table.
    """
    db_id = script.parent.name
    try:
        text = read_bytes(script, max_bytes=_MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{script} cannot be read ({error}); copy or download it again.") from error
    # Named like its origin, which tells apart a database of both folders.
    folder = CACHE / hashlib.sha256(text.encode()).hexdigest()[:32] / script.parent.parent.name / db_id
    target = folder / f"{db_id}.sqlite"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            part = Path(name) / "part.sqlite"
            try:
                _run(text, part)
            except (sqlite3.Error, sqlite3.Warning) as error:
                raise DataError(
                    f"{script} makes no SQLite database: {error}; repair it, or add {db_id}.sqlite."
                ) from error
            os.replace(part, target)
    return target.resolve()


def _run(text: str, target: Path) -> None:
    """Run the script. It can reach no other file, and ends after a limit."""
    steps = iter(range(_MAX_STEPS))
    connection = sqlite3.connect(target, isolation_level=None)
    try:
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_DENY if action in _DENIED else sqlite3.SQLITE_OK)
        connection.set_progress_handler(lambda: next(steps, None) is None, 100_000)
        connection.executescript(text)
        if not connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]:
            raise sqlite3.DatabaseError("it creates no table")
    finally:
        connection.close()
