"""The variants of a gold, made at its first use and kept in the user's cache.

A folder of the cache is named after a hash of all that its files were made of, and gets its name when they are
complete. One process makes it while others that need it wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from functools import lru_cache
from pathlib import Path

from platformdirs import user_cache_path

from groundwire.tools.files import TemporaryFolder
from groundwire.tools.sql import DatabaseError, readable, signature
from groundwire.tools.variants.build import GoldSource, build_variants, read_source

CACHE = user_cache_path("groundwire", appauthor=False) / "variants"
_LOCKS = 32
_log = logging.getLogger(__name__)


class NoVariantsError(Exception):
    """A gold has no variants; the message says why."""


_making = [threading.Lock() for _ in range(_LOCKS)]


def variants_of(database: str, gold: str, question: str = "") -> tuple[str, ...]:
    """The variants on which an answer must be right; the first call takes a moment. Raises :class:`NoVariantsError`."""
    try:
        with readable(database):
            key = (database, signature(database), gold, question)
    except DatabaseError as error:
        raise NoVariantsError(str(error)) from error
    with _making[hash(key) % _LOCKS]:  # a group asks for the same gold at once
        files, problem = _find(*key)
        if not all(map(os.path.isfile, files)):  # the folder of the cache may be emptied at any time
            _find.cache_clear()
            files, problem = _find(*key)
    if not files:
        raise NoVariantsError(problem)
    return files


@lru_cache(maxsize=65_536)
def _find(database: str, _signature: tuple[int, ...], gold: str, question: str) -> tuple[tuple[str, ...], str]:
    """The files of a gold, and why there are none."""
    try:
        source = read_source(database, gold, question)
        try:
            folder = CACHE / source.key[:2] / source.key
            if not folder.is_dir():
                locks = CACHE / ".locks"
                locks.mkdir(parents=True, exist_ok=True)
                with (locks / source.key[0]).open("w") as lock:  # another process may make them now
                    with contextlib.suppress(OSError, ImportError):  # a file system or a system without locks
                        import fcntl

                        fcntl.flock(lock, fcntl.LOCK_EX)
                    _make(folder, source)
        except OSError as error:
            _log.warning("variants of databases are not kept, because %s cannot be written: %s", CACHE, error)
            folder = _own_folder().path / source.key
            _make(folder, source)
    except (DatabaseError, OSError) as error:
        return (), str(error)
    files = tuple(sorted(map(str, folder.glob("*.sqlite"))))
    return files, "" if files else "no variant of its database tells its result from a constant one"


def _make(folder: Path, source: GoldSource) -> None:
    """Make ``folder``, unless another process has. Raises OSError and DatabaseError."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder(".part-", folder.parent) as place:
        complete = place / "complete"
        complete.mkdir()
        build_variants(source, complete)
        try:
            complete.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, on a file system without locks
                raise


@lru_cache(maxsize=1)
def _own_folder() -> TemporaryFolder:
    return TemporaryFolder("groundwire-variants-")
