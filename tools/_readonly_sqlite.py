"""A pool of read-only connections, reused while the file stays the same.

SQLite itself enforces the limits; the text of a query is never inspected:

- ``mode=ro`` opens the file read-only. It is not enough: ATTACH creates files, VACUUM INTO copies the database.
- An authorizer allows SELECT, READ, FUNCTION (less a few) and RECURSIVE, and refuses everything else at prepare time.
  That includes PRAGMA, because a query could switch ``query_only`` and similar settings off.
- A progress handler checks a deadline. Before SQLite 3.41 it does not run while a query is planned, so the authorizer
  checks the deadline too. A query that escapes both (nested CTEs that double at every level) hits the heap limit.

Opening a file costs ten times a small query, so connections are reused. The authorizer and the handler are set once,
because a new authorizer makes SQLite prepare every cached statement again. Connections are not bound to threads, so
their number is limited for any number of threads and databases: each has its own page cache, and SQLite has one heap
limit for the whole process. Concurrent queries use one connection each.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

__all__ = [
    "MAX_SQL_LENGTH",
    "MAX_VALUE_LENGTH",
    "Connection",
    "acquire",
    "columns",
    "open_readonly",
    "quote_identifier",
    "read_error",
    "release",
    "signature",
]

MAX_SQL_LENGTH = 100_000
"""Bytes of one query's text."""
MAX_VALUE_LENGTH = 100_000
"""Bytes of one TEXT or BLOB value, stored or computed.

This limits memory and time: instr(), replace() and LIKE take quadratic time inside one opcode, where no deadline is
checked (27 s for values of 1 MB, 0.25 s for these).
"""

_HEAP_LIMIT = 256 * 1024 * 1024
_PAGE_CACHE_KB = 500  # of each connection
_IDLE_CONNECTIONS = 64  # with full caches an eighth of the heap limit
_LOCK_WAIT_S = 1.0
# Low numbers slow down heavy queries (18 % at 100, 4 % at 1000); with high ones slow opcodes exceed the deadline.
_OPCODES_PER_CHECK = 100
_LIMITS = {
    "LENGTH": MAX_VALUE_LENGTH,
    "SQL_LENGTH": MAX_SQL_LENGTH,
    "LIKE_PATTERN_LENGTH": 250,
    "ATTACHED": 0,
    "WORKER_THREADS": 0,
}

_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
# Functions of some builds of SQLite or of its shell that load code, access files, or write to the error log.
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

# Bytes that are not UTF-8 are dropped, as in Spider's evaluator.
_decode = functools.partial(str, encoding="utf-8", errors="ignore")


def signature(path: str) -> tuple[int, int, int, int]:
    """A key that changes with the file. Raises OSError if there is no file."""
    stat = os.stat(path)
    return (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)


def quote_identifier(name: str) -> str:
    """The identifier, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def read_error(path: str, error: Exception) -> str:
    """Why the database at ``path`` cannot be read."""
    if not os.path.exists(path):
        return f"no database at {path}"
    return f"the database {path} cannot be read: {error}"


def _wal_without_log(path: str) -> bool:
    """Whether the database is in WAL mode but has no log file.

    A read-only connection to it would create -wal and -shm files. ``immutable`` prevents that, and is safe without log.
    """
    with open(path, "rb") as file:
        in_wal_mode = file.read(20)[18:20] == b"\x02\x02"
    return in_wal_mode and not os.path.exists(f"{path}-wal")


def open_readonly(path: str) -> sqlite3.Connection:
    """A read-only connection without limits, for trusted statements. Raises sqlite3.Error and OSError."""
    if os.path.getsize(path) == 0:
        raise sqlite3.DatabaseError("the file is empty")  # SQLite would open it as a database without tables
    uri = f"file:{quote(os.path.abspath(path))}?mode=ro"
    if _wal_without_log(path):
        uri += "&immutable=1"
    # Several threads use it, one after another.
    raw = sqlite3.connect(uri, uri=True, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
    raw.text_factory = _decode
    return raw


@functools.lru_cache(maxsize=256)
def columns(path: str, _signature: tuple[int, ...]) -> dict[str, list[str]]:
    """The tables and views of a database, each with its columns. Raises OSError or sqlite3.Error."""
    with contextlib.closing(open_readonly(path)) as conn:
        names = conn.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        return {
            name: [column[1] for column in conn.execute(f"PRAGMA table_info({quote_identifier(name)})")]
            for (name,) in names
            if not name.startswith("sqlite_")
        }


def _trim(strip: Callable[[str, str], str], value: Any, characters: Any) -> str | None:
    """trim(X, Y). SQLite's own takes len(X) * len(Y) steps inside one opcode: 30 s for 100 kB."""
    if value is None or characters is None:
        return None
    return strip(_as_text(value), "".join(set(_as_text(characters))))


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return _decode(value)
    if isinstance(value, float):
        digits, e, exponent = f"{value:.15g}".partition("e")
        return (digits if "." in digits or not math.isfinite(value) else f"{digits}.0") + e + exponent
    return str(value)


class Connection:
    """A limited connection and the state of its current query."""

    def __init__(self, path: str) -> None:
        self.path, self.signature = path, signature(path)
        self.deadline = float("inf")
        self._stops: tuple[threading.Event, ...] = ()
        self.stopped = False
        self.refused = ""
        """The action of this query that the authorizer refused; empty if none."""
        self.refused_function = ""
        self._log = f"{path}-wal" if _wal_without_log(path) else None
        self.raw = open_readonly(path)
        # The heap limit holds for SQLite in the whole process and can only be lowered. It stops queries with many long
        # values. On Python 3.10, which has no setlimit, it is the only limit of a single value.
        self.raw.execute(f"PRAGMA hard_heap_limit={_HEAP_LIMIT}").close()
        self.raw.execute(f"PRAGMA cache_size=-{_PAGE_CACHE_KB}").close()
        self._open_virtual_tables()  # this also reads the schema, so a broken file fails here
        if hasattr(self.raw, "setlimit"):  # from Python 3.11
            for limit, value in _LIMITS.items():
                self.raw.setlimit(getattr(sqlite3, f"SQLITE_LIMIT_{limit}"), value)
        for name, strip in (("trim", str.strip), ("ltrim", str.lstrip), ("rtrim", str.rstrip)):
            self.raw.create_function(name, 2, functools.partial(_trim, strip), deterministic=True)
        self.raw.set_progress_handler(self._expired, _OPCODES_PER_CHECK)
        self.raw.set_authorizer(self._authorize)

    def _open_virtual_tables(self) -> None:
        # On its first use SQLite declares a virtual table with a CREATE TABLE, which the authorizer would refuse.
        own = self.raw.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL%'").fetchall()
        for name in ("json_each", "json_tree", *(name for (name,) in own)):
            with contextlib.suppress(sqlite3.OperationalError):  # a module that this build of SQLite lacks
                self.raw.execute(f"SELECT 1 FROM {quote_identifier(name)} LIMIT 0").close()  # noqa: S608

    def is_current(self, path: str) -> bool:
        """Whether the file is still the one that this connection opened."""
        try:
            return self.signature == signature(path) and (self._log is None or not os.path.exists(self._log))
        except OSError:
            return False

    def start(self, deadline: float, stops: tuple[threading.Event, ...] = ()) -> None:
        """Reset the state. The next query ends at ``deadline`` (of perf_counter) or when one of ``stops`` is set."""
        self.deadline, self._stops, self.stopped = deadline, stops, False
        self.refused = self.refused_function = ""

    @property
    def cancelled(self) -> bool:
        """Whether one of the stop events is set."""
        return any(stop.is_set() for stop in self._stops)

    def close(self) -> None:
        """Close it now: this object and SQLite's form a cycle, which the garbage collector would find much later."""
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
            return sqlite3.SQLITE_OK  # a full-text index reads it before a query; it changes nothing
        if action not in _ALLOWED:
            # CREATE and DROP begin with a write to the schema table.
            schema = (first or "").lower().startswith("sqlite_") and action != sqlite3.SQLITE_ANALYZE
            self.refused = "changing the schema" if schema else _ACTIONS.get(action, f"action {action}")
        elif action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _DENIED_FUNCTIONS:
            self.refused_function = str(second)
        else:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY


class _Idle:
    """The connections without a query, the least recently used first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: list[Connection] = []

    def pop(self, path: str) -> Connection | None:
        """The connection to ``path`` that was used last."""
        with self._lock:
            for index in reversed(range(len(self._connections))):
                if self._connections[index].path == path:
                    return self._connections.pop(index)
        return None

    def push(self, connection: Connection) -> None:
        with self._lock:
            self._connections.append(connection)
            unused = self._connections.pop(0) if len(self._connections) > _IDLE_CONNECTIONS else None
        if unused is not None:
            unused.close()


_idle = _Idle()


def acquire(path: str) -> Connection:
    """A connection to ``path`` for one query, to be returned with :func:`release`.

    Raises OSError or sqlite3.Error if there is no readable database.
    """
    while (found := _idle.pop(path)) is not None:
        if found.is_current(path):
            return found
        found.close()
    return Connection(path)


def release(connection: Connection) -> None:
    """Return a connection to the pool."""
    _idle.push(connection)


def _drop_pool() -> None:
    global _idle  # noqa: PLW0603
    _idle = _Idle()


# SQLite forbids carrying a connection into a forked process.
os.register_at_fork(after_in_child=_drop_pool)
