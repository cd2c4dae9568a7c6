"""Databases that Spider folders have as a script, ``schema.sql``.

A script comes from others, and SQL can ask for any amount of time, memory and disk. So it runs in a process of its own,
within limits, and reaches no other file.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from platformdirs import user_cache_path

from groundwire.domains._types import DataError
from groundwire.tools import worker_process
from groundwire.tools.files import TemporaryFolder, new_database, read_bytes
from groundwire.tools.sql.connections import DENIED_FUNCTIONS
from groundwire.tools.worker_process import WorkerEndedError, WorkerPool

CACHE = user_cache_path("groundwire", appauthor=False) / "spider"
_MAX_SCRIPT_BYTES = 64 << 20
_MAX_PAGES, _PAGE_BYTES = 65_536, 4096
_CPU_S = 10.0
_HEAP_BYTES = 256 << 20  # of SQLite: temporary tables, sorting and what a transaction may undo
_MEMORY_BYTES = _HEAP_BYTES + 12 * _MAX_SCRIPT_BYTES
"""Of the process: a script of rare characters takes four bytes for each, and there are copies."""
_PRAGMAS = {"application_id", "defer_foreign_keys", "encoding", "foreign_keys", "user_version"}
"""Those that have an effect. Others could lift the limits."""
_MODULES = {"fts3", "fts4", "fts5", "geopoly", "rtree", "rtree_i32"}  # of virtual tables: others may read files
_DENIED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}
_workers = WorkerPool(__name__)


def build(script: Path) -> Path:
    """The SQLite file that ``script`` makes, named after the script's folder.

    Raises :class:`DataError` if the script fails, makes no table or takes too much time, memory or disk.
    """
    db_id = script.parent.name
    try:
        text = read_bytes(script, max_bytes=_MAX_SCRIPT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{script} cannot be read ({error}); copy or download it again.") from error
    # Named like its origin, which tells apart a database of both folders.
    folder = CACHE / hashlib.sha256(text.encode()).hexdigest()[:32] / script.parent.parent.name / db_id
    target = folder / f"{db_id}.sqlite"
    if target.is_file():
        return target.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder(".part-", folder) as place:
        unfinished = place / "unfinished.sqlite"
        try:
            problem = (_workers.ask(lambda: marshal.dumps((str(unfinished), text, _CPU_S))) or b"").decode()
        except WorkerEndedError as error:
            problem = f"it takes more than {_CPU_S:g} s of CPU time" if error.timed_out else str(error)
        if problem:
            remedy = f"repair it, or add {db_id}.sqlite"
            raise DataError(f"{script} makes no SQLite database: {problem}; {remedy}.")
        os.replace(unfinished, target)
    return target.resolve()


def serve(descriptor: int, parent: int) -> None:
    """Run the scripts that arrive, in a process of its own."""
    worker_process.limit_memory(_MEMORY_BYTES)
    worker_process.answer_requests(_answer, descriptor, parent)


def _answer(request: bytes) -> bytes:
    file, script, cpu_s = marshal.loads(request)  # noqa: S302 - from our parent
    with worker_process.time_limit(signal.ITIMER_PROF, cpu_s):
        return _run(file, script).encode()


def _run(file: str, script: str) -> str:
    """Make the database; what was wrong, or nothing."""
    refused: list[str] = []

    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        reads_page_size = (first, second) == ("page_size", None)  # as rtree does
        if action == sqlite3.SQLITE_PRAGMA and str(first).lower() not in _PRAGMAS and not reads_page_size:
            return sqlite3.SQLITE_IGNORE
        is_function = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in DENIED_FUNCTIONS
        is_module = action == sqlite3.SQLITE_CREATE_VTABLE and str(second).lower() not in _MODULES
        if is_function or is_module:
            refused.append(str(second))
        elif action in _DENIED:
            refused.append("ATTACH, DETACH or VACUUM")
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    new_database(file)
    try:
        with closing(sqlite3.connect(file, isolation_level=None)) as db:
            for pragma in (
                f"hard_heap_limit = {_HEAP_BYTES}",
                f"page_size = {_PAGE_BYTES}",
                f"max_page_count = {_MAX_PAGES}",
                "journal_mode = MEMORY",  # one file, whose size is limited
                "temp_store = MEMORY",
                "synchronous = OFF",
            ):
                db.execute(f"PRAGMA {pragma}")
            db.set_authorizer(authorize)
            db.executescript(script)
            if db.in_transaction:
                return "its last transaction has no COMMIT: is it cut off?"
            has_table = db.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
            return "" if has_table else "it creates no table"
    except (MemoryError, OverflowError):
        return f"it takes more than {_HEAP_BYTES >> 20} MB of memory"
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        if refused:
            return f"{refused[0]} is not allowed in it"
        if "disk is full" in str(error):
            return f"it makes more than {_MAX_PAGES * _PAGE_BYTES >> 20} MB, or the disk is full"
        return str(error)
