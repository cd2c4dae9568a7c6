"""Open connections that can only read: kept from query to query while the file stays the same.

The engine itself refuses to write, three times over, and nobody looks at the text of a query:

- ``mode=ro`` opens the file read-only. Alone it is not enough: ATTACH creates files, VACUUM INTO copies the database.
- An authorizer that allows SELECT, READ, FUNCTION (less a few) and RECURSIVE, and refuses everything else at prepare
  time: all of PRAGMA too, since ``query_only`` and its like can be switched off by the query itself.
- A progress handler with a deadline. Before SQLite 3.41 none runs while a query is planned, so the authorizer checks
  the deadline too, and what it does not see (a nest of CTEs that doubles at every level) ends at the heap limit.

Opening a file costs ten times a small query, so connections are reused; the authorizer and the handler are set once,
because changing an authorizer makes SQLite prepare every cached statement again. They belong to no thread, so that
their number is bounded, however many threads ask however many databases: each has a page cache of its own, and SQLite
has one heap limit for the whole process. Queries that run at the same time have one each.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

__all__ = [
    "MAX_SQL_LENGTH",
    "MAX_VALUE_LENGTH",
    "Connection",
    "broken",
    "columns",
    "give",
    "open_readonly",
    "quoted",
    "signature",
    "take",
]

MAX_SQL_LENGTH = 100_000
"""Bytes of one query's text."""
MAX_VALUE_LENGTH = 100_000
"""Bytes of one TEXT or BLOB value, stored or built.

It bounds the memory of an expression, and its time: instr(), replace() and LIKE take quadratic time inside one opcode,
where no deadline is looked at (27 s for values of 1 MB, a quarter of a second for these).
"""

_HEAP_LIMIT = 256 * 1024 * 1024
_PAGE_CACHE_KB = 500  # a connection
_IDLE_CONNECTIONS = 64  # with full caches an eighth of the heap limit
_LOCK_WAIT_S = 1.0
# Fewer slow down the heavy queries (18 % at 100, 4 % at 1000); more let a query of slow opcodes run further over.
_OPCODES_PER_CHECK = 100
_LIMITS = {
    "LENGTH": MAX_VALUE_LENGTH,
    "SQL_LENGTH": MAX_SQL_LENGTH,
    "LIKE_PATTERN_LENGTH": 250,
    "ATTACHED": 0,
    "WORKER_THREADS": 0,
}

_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
# Those that a build of SQLite or its shell may have: they load code, touch files, or write to the error log.
_DENIED_FUNCTIONS = frozenset(
    {"edit", "eval", "fts3_tokenizer", "icu_load_collation", "load_extension", "readfile", "sqlite_log", "writefile"}
)
_ACTIONS = {
    getattr(sqlite3, name): name.removeprefix("SQLITE_").replace("_", " ")
    for name in dir(sqlite3)
    if name.startswith(("SQLITE_ALTER", "SQLITE_CREATE", "SQLITE_DROP"))
}
_ACTIONS |= {
    sqlite3.SQLITE_ANALYZE: "ANALYZE",
    sqlite3.SQLITE_ATTACH: "ATTACH or VACUUM",
    sqlite3.SQLITE_DELETE: "DELETE",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_INSERT: "INSERT",
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
    sqlite3.SQLITE_REINDEX: "REINDEX",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT",
    sqlite3.SQLITE_TRANSACTION: "a transaction",
    sqlite3.SQLITE_UPDATE: "UPDATE",
}

# What may be read badly must still be read: the bytes that are no UTF-8 are dropped, as Spider's evaluator drops them.
_text = functools.partial(str, encoding="utf-8", errors="ignore")


def signature(path: str) -> tuple[int, int, int, int]:
    """What changes when the file does. Raises OSError when there is none."""
    stat = os.stat(path)
    return (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)


def quoted(name: str) -> str:
    """The identifier as SQL, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def broken(path: str, error: Exception) -> str:
    """Why the database at ``path`` cannot be read, as one sentence."""
    if not os.path.exists(path):
        return f"no database at {path}"
    return f"the database {path} cannot be read: {error}"


def _is_wal(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _nothing_but_the_file(path: str) -> bool:
    """Even a read-only connection to a database in WAL mode creates -wal and -shm files beside it. Where no log waits
    to be read, there is nothing but the file, and SQLite can be told that it is all there is."""
    return _is_wal(path) and not os.path.exists(f"{path}-wal")


def open_readonly(path: str) -> sqlite3.Connection:
    """A bare read-only connection, for statements of our own. Raises sqlite3.Error and OSError."""
    if os.path.getsize(path) == 0:
        raise sqlite3.DatabaseError("the file is empty")  # SQLite would take it for a database without tables
    uri = f"file:{quote(os.path.abspath(path))}?mode=ro"
    if _nothing_but_the_file(path):
        uri += "&immutable=1"
    # Not bound to a thread: one after the other uses it.
    raw = sqlite3.connect(uri, uri=True, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
    raw.text_factory = _text
    return raw


@functools.lru_cache(maxsize=256)
def columns(path: str, _signature: tuple[int, ...]) -> dict[str, list[str]]:
    """The tables and views of a database, each with its columns. Raises OSError or sqlite3.Error."""
    with contextlib.closing(open_readonly(path)) as conn:
        names = conn.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        return {
            name: [column[1] for column in conn.execute(f"PRAGMA table_info({quoted(name)})")]
            for (name,) in names
            if not name.startswith("sqlite_")
        }


def _trim(strip: Callable[[str, str], str], value: Any, characters: Any) -> str | None:
    """SQLite's own trim(X, Y) takes len(X) * len(Y) steps, half a minute inside one opcode even for 100 kB."""
    if value is None or characters is None:
        return None
    return strip(_as_text(value), "".join(set(_as_text(characters))))


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, float):
        digits, e, exponent = f"{value:.15g}".partition("e")
        return (digits if "." in digits or not math.isfinite(value) else f"{digits}.0") + e + exponent
    return str(value)


class Connection:
    """A guarded connection and the state of the query that runs on it."""

    def __init__(self, path: str) -> None:
        self.path, self.signature = path, signature(path)
        self.deadline = float("inf")
        self._stops: tuple[threading.Event, ...] = ()
        self.stopped = False
        self.refused = ""
        """What the authorizer refused in this query, in words; empty when nothing was."""
        self.refused_function = ""
        self._log = f"{path}-wal" if _nothing_but_the_file(path) else None
        self.raw = open_readonly(path)
        # A heap limit holds for SQLite in the whole process, and only ever goes down. It is what bounds a query with
        # many long values at once, and all that bounds one value on Python 3.10, which has no setlimit.
        self.raw.execute(f"PRAGMA hard_heap_limit={_HEAP_LIMIT}").close()
        self.raw.execute(f"PRAGMA cache_size=-{_PAGE_CACHE_KB}").close()
        self._open_virtual_tables()  # also reads the schema: a broken file says so here, not later
        if hasattr(self.raw, "setlimit"):  # from Python 3.11
            for limit, value in _LIMITS.items():
                self.raw.setlimit(getattr(sqlite3, f"SQLITE_LIMIT_{limit}"), value)
        for name, strip in (("trim", str.strip), ("ltrim", str.lstrip), ("rtrim", str.rstrip)):
            self.raw.create_function(name, 2, functools.partial(_trim, strip), deterministic=True)
        self.raw.set_progress_handler(self._expired, _OPCODES_PER_CHECK)
        self.raw.set_authorizer(self._authorize)

    def _open_virtual_tables(self) -> None:
        # SQLite declares a virtual table on its first use, as a CREATE TABLE that the authorizer would refuse.
        own = self.raw.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL%'").fetchall()
        for name in ("json_each", "json_tree", *(name for (name,) in own)):
            with contextlib.suppress(sqlite3.OperationalError):  # a module that this build of SQLite lacks
                self.raw.execute(f"SELECT 1 FROM {quoted(name)} LIMIT 0").close()  # noqa: S608

    def is_current(self, path: str) -> bool:
        """Whether the file is still there, and still what this connection took it for."""
        try:
            return self.signature == signature(path) and (self._log is None or not os.path.exists(self._log))
        except OSError:
            return False

    def start(self, deadline: float, stops: tuple[threading.Event, ...] = ()) -> None:
        """Forget the last query, and stop the next one at ``deadline`` (of perf_counter) or when one of ``stops`` is
        set."""
        self.deadline, self._stops, self.stopped = deadline, stops, False
        self.refused = self.refused_function = ""

    @property
    def cancelled(self) -> bool:
        """Whether somebody wants this query to stop."""
        return any(stop.is_set() for stop in self._stops)

    def close(self) -> None:
        """Now, and not when Python comes to look for cycles: SQLite knows this object, and this object SQLite's."""
        self.raw.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self.raw.close()

    def _expired(self) -> bool:
        if time.perf_counter() > self.deadline or (self._stops and self.cancelled):
            self.stopped = True
        return self.stopped

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if self._expired():
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_PRAGMA and first == "data_version" and second is None:
            return sqlite3.SQLITE_OK  # what a full-text index asks before it is read; it changes nothing
        if action not in _ALLOWED:
            # CREATE and DROP show up first as writes to the schema table.
            schema = (first or "").lower().startswith("sqlite_") and action != sqlite3.SQLITE_ANALYZE
            self.refused = "changing the schema" if schema else _ACTIONS.get(action, f"action {action}")
        elif action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _DENIED_FUNCTIONS:
            self.refused_function = str(second)
        else:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY


class _Idle:
    """The connections that no query runs on, the least recently used first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: OrderedDict[str, list[Connection]] = OrderedDict()
        self.count = 0

    def pop(self, path: str) -> Connection | None:
        with self._lock:
            there = self._of.get(path)
            if there is None:
                return None
            if len(there) == 1:
                del self._of[path]
            self.count -= 1
            return there.pop()

    def push(self, conn: Connection) -> None:
        with self._lock:
            self._of.setdefault(conn.path, []).append(conn)
            self._of.move_to_end(conn.path)
            self.count += 1
            full = self.count > _IDLE_CONNECTIONS
            oldest = next(iter(self._of)) if full else ""
        if full and (unused := self.pop(oldest)) is not None:
            unused.close()


_idle = _Idle()


def take(path: str) -> Connection:
    """A connection to ``path`` for one query, opened anew if the file is another than before; :func:`give` it back.

    Raises OSError or sqlite3.Error when there is no readable database.
    """
    while (found := _idle.pop(path)) is not None:
        if found.is_current(path):
            return found
        found.close()
    return Connection(path)


def give(conn: Connection) -> None:
    """Keep a connection for the next query."""
    _idle.push(conn)


def _forget() -> None:
    global _idle  # noqa: PLW0603
    _idle = _Idle()


# SQLite forbids carrying a connection into a forked process.
os.register_at_fork(after_in_child=_forget)
