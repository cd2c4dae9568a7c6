"""A pool of read-only connections, reused while the file stays the same.

SQLite itself enforces the limits; the text of a query is never inspected:

- ``mode=ro`` opens the file read-only. It is not enough: ATTACH creates files, VACUUM INTO copies the database.
- An authorizer allows SELECT, READ, FUNCTION (less a few) and RECURSIVE, and refuses everything else at prepare time.
  That includes PRAGMA, because a query could switch ``query_only`` and similar settings off.
- A progress handler checks a deadline at the jumps of SQLite's program. Before SQLite 3.41 it does not run while a
  query is planned, so the authorizer checks the deadline too.
- Both come late for functions of long values and for a plan that repeats an expression many times. Such a query must
  run in a process that can be killed (:mod:`groundwire.tools.sql.query`). A connection of the caller's own
  process is ``inline``: it has lower limits and accepts only functions that are known to be fast. Ordinary queries
  pass; any other query gets a :class:`NeedsProcessError`.

Opening a file costs ten times a small query, so connections are reused. The authorizer and the handler are set once,
because a new authorizer makes SQLite prepare every cached statement again. Connections are not bound to threads, so
their number is limited for any number of threads and databases: each has its own page cache. Concurrent queries use one
connection each.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import sys
import threading
import time
from typing import Any

from groundwire.tools.sql.catalog import Entry, entries, may_fill_memory, quote_identifier, views_may_fill_memory
from groundwire.tools.sql.opening import OPCODES_PER_CHECK, SQLITE_ERRORS, open_readonly

MAX_SQL_LENGTH = 100_000
"""Bytes of one query's text."""
MAX_VALUE_LENGTH = 16_000_000
"""Bytes of one TEXT or BLOB value, stored or computed: a query that meets a longer one fails, whatever it does with it.
"""
IOERR_NOMEM = 10 | 12 << 8
"""SQLite's code of an I/O error for lack of memory."""
TOOBIG = 18
"""SQLite's code of a value that is too long."""

_PAGE_CACHE_KB = 500  # of each connection
_IDLE_CONNECTIONS = 64
_LIMITS = {
    "LENGTH": MAX_VALUE_LENGTH,
    "SQL_LENGTH": MAX_SQL_LENGTH,
    "LIKE_PATTERN_LENGTH": 250,
    "ATTACHED": 0,
    "WORKER_THREADS": 0,
}
# Within these limits neither 100 opcodes nor the planning take more than some tenths of a second. The work is counted
# while SQLite compiles the query, where a view or a common table expression counts once for each use.
_INLINE_SQL_LENGTH = 5000
_INLINE_LIMITS = {"LENGTH": 5000, "VDBE_OP": 5000}
_INLINE_WORK = 1000
_INLINE_S = 0.5  # a longer query would also fill the disk with temporary files
_SELECT_WORK, _FUNCTION_WORK, _SEARCH_WORK = 10, 20, 120
_FUNCTIONS = (
    "abs acos acosh asin asinh atan atan2 atanh avg ceil ceiling coalesce cos cosh count cume_dist current_date "
    "current_time current_timestamp date datetime degrees dense_rank exp first_value floor if ifnull iif julianday lag "
    "last_value lead length likelihood likely ln log log10 log2 lower max min mod nth_value ntile nullif octet_length "
    "percent_rank pi pow power radians random rank round row_number sign sin sinh soundex sqlite_version sqrt strftime "
    "substr substring sum tan tanh time timediff total trunc typeof unhex unicode unixepoch unlikely upper"
)
# These are short only where the length of a value is limited.
_GROWING_FUNCTIONS = "char concat concat_ws group_concat hex quote randomblob string_agg zeroblob"
_SEARCHES = "glob instr like replace"  # their time is the product of two lengths
_HAS_LIMITS = hasattr(sqlite3.Connection, "setlimit")  # from Python 3.11
# Within the limits of an inline connection every other opcode takes less than about ten microseconds.
_SLOW = (*_GROWING_FUNCTIONS.split(), *_SEARCHES.split(), "trim")
_AS = re.compile(r"\bas\b", re.IGNORECASE)  # of a view or a generated column
_OPCODES_PER_RARE_CHECK = 1000
_WORK = dict.fromkeys(_FUNCTIONS.split(), _FUNCTION_WORK)
if _HAS_LIMITS:
    _WORK |= dict.fromkeys(_GROWING_FUNCTIONS.split(), _FUNCTION_WORK) | dict.fromkeys(_SEARCHES.split(), _SEARCH_WORK)

_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
# Functions of some builds of SQLite or of its shell that load code, access files, or write to the error log.
DENIED_FUNCTIONS = frozenset(
    {"edit", "eval", "fts3_tokenizer", "icu_load_collation", "load_extension", "readfile", "sqlite_log", "writefile"}
)
_REFUSED = re.compile("SQLITE_((?:ALTER|CREATE|DROP)_.*|ANALYZE|DELETE|DETACH|INSERT|PRAGMA|REINDEX|SAVEPOINT|UPDATE)")
_ACTIONS = {
    getattr(sqlite3, name): match[1].replace("_", " ") for name in dir(sqlite3) if (match := _REFUSED.fullmatch(name))
} | {sqlite3.SQLITE_ATTACH: "ATTACH or VACUUM", sqlite3.SQLITE_TRANSACTION: "a transaction"}


class NeedsProcessError(Exception):
    """The query may exceed its deadline by much, or needs much memory: it must run in a process of its own."""


def check_inline(sql: str) -> None:
    """Raise :class:`NeedsProcessError` for a query that needs a process by its text.

    Without limits the operator ``||`` can make a value of any length.
    """
    too_long = len(sql) > _INLINE_SQL_LENGTH or ("||" in sql and not _HAS_LIMITS)
    if too_long or may_fill_memory(sql):
        raise NeedsProcessError


def _has_slow(sql: str) -> bool:
    lowered = sql.lower()
    return any(word in lowered for word in _SLOW)


class StoppedError(Exception):
    """The query's time was over, or it was cancelled, before its database was open."""


class Connection:
    """A limited connection and the state of its current query. ``inline``: with the limits of the caller's process."""

    def __init__(
        self, path: str, deadline: float, stops: tuple[threading.Event, ...] = (), *, inline: bool = True
    ) -> None:
        self.path, self.inline, self._opcodes = path, inline, OPCODES_PER_CHECK
        self.start(deadline, stops)
        self._end = deadline  # also inline: what opens a database is known, and every query would need it again
        self._virtual_tables = {"json_each", "json_tree"}
        try:
            self.raw = open_readonly(path, stop=self._progress)
            self.raw.execute(f"PRAGMA cache_size=-{_PAGE_CACHE_KB}").close()
            listed = entries(self.raw)
            if inline and views_may_fill_memory(self.raw, listed):
                raise NeedsProcessError
            self._open_virtual_tables(listed)
            has_views = any(entry.kind == "view" for entry in listed)
            tables = [] if has_views else [entry.name for entry in listed if entry.kind == "table"]
            self._tables = {name: name.lower() for name in tables}
            defined = (entry.sql for entry in listed if _AS.search(entry.sql))
            self._has_slow = not (inline and _HAS_LIMITS) or any(map(_has_slow, defined))
            self.start(deadline, stops)
        except BaseException as error:
            self.close()
            if self.stopped and isinstance(error, SQLITE_ERRORS):
                raise StoppedError from None
            raise
        limits = _LIMITS | (_INLINE_LIMITS if inline else {})
        self.max_value = limits["LENGTH"] if _HAS_LIMITS else sys.maxsize
        if hasattr(self.raw, "setlimit"):
            for limit, value in limits.items():
                self.raw.setlimit(getattr(sqlite3, f"SQLITE_LIMIT_{limit}"), value)
        self.raw.set_authorizer(self._authorize)
        self._drop_bytes, self.raw.text_factory = self.raw.text_factory, str  # which takes a third of the time

    def _open_virtual_tables(self, listed: list[Entry]) -> None:
        # On its first use SQLite declares a virtual table with a CREATE TABLE, which the authorizer would refuse.
        self._virtual_tables |= {entry.name for entry in listed if entry.kind == "virtual table"}
        for name in self._virtual_tables:
            try:
                self.raw.execute(f"SELECT 1 FROM {quote_identifier(name)} LIMIT 0").close()  # noqa: S608
            except SQLITE_ERRORS:  # a module that is missing, or tables of its own; only a query that reads it fails
                if self.stopped:
                    raise

    def count_steps(self, sql: str, *, exactly: bool) -> None:
        """Look at the deadline, and count, every hundred opcodes, or if they need not be exact and are fast, seldom."""
        often = exactly or self._has_slow or _has_slow(sql)
        opcodes = OPCODES_PER_CHECK if often else _OPCODES_PER_RARE_CHECK
        if opcodes != self._opcodes:
            self._opcodes = opcodes
            self.raw.set_progress_handler(self._progress, opcodes)

    def start(self, deadline: float, stops: tuple[threading.Event, ...] = ()) -> None:
        """Begin a query, which ends at ``deadline`` (of perf_counter) or when one of ``stops`` is set."""
        self.deadline, self._stops, self.stopped = deadline, stops, False
        self._end = min(deadline, time.perf_counter() + _INLINE_S) if self.inline else deadline
        self.refused = self.refused_function = ""
        self._work = self._checks = 0
        self.tables_read = set[str]()

    def can_drop_bytes(self, error: sqlite3.Error) -> bool:
        """Whether the query failed at bytes that are no UTF-8, and will not from now on."""
        if strict := self.raw.text_factory is str and str(error).startswith("Could not decode to UTF-8"):
            self.raw.text_factory, self._checks = self._drop_bytes, 0
        return strict

    def needs_process(self, error: Exception) -> bool:
        """Whether the query failed at a limit that does not hold in a process of its own."""
        if self.stopped:
            return not self.cancelled and time.perf_counter() < self.deadline
        if self.refused or self.refused_function:
            return False
        code = getattr(error, "sqlite_errorcode", 0)
        return self._work > _INLINE_WORK or isinstance(error, MemoryError) or code in (TOOBIG, IOERR_NOMEM)

    @property
    def vm_steps(self) -> int:
        """The steps of SQLite's virtual machine that the query has taken, in hundreds."""
        return self._checks * self._opcodes

    @property
    def cancelled(self) -> bool:
        """Whether one of the stop events is set."""
        return any(stop.is_set() for stop in self._stops)

    def close(self) -> None:
        """Close the file now: the object and SQLite's form a cycle, which the garbage collector finds much later."""
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self.raw.close()

    __del__ = close

    def _progress(self) -> bool:
        self._checks += 1
        if time.perf_counter() > self._end or (self._stops and self.cancelled):
            self.stopped = True
        return self.stopped

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if time.perf_counter() > self._end or (self._stops and self.cancelled):
            self.stopped = True
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_PRAGMA and first == "data_version" and second is None:
            return sqlite3.SQLITE_OK  # a full-text index reads it before a query; it changes nothing
        if action not in _ALLOWED:
            # CREATE and DROP begin with a write to the schema table.
            schema = (first or "").lower().startswith("sqlite_") and action != sqlite3.SQLITE_ANALYZE
            self.refused = "changing the schema" if schema else _ACTIONS.get(action, f"action {action}")
        elif action == sqlite3.SQLITE_FUNCTION and str(second).lower() in DENIED_FUNCTIONS:
            self.refused_function = str(second)
        elif not self.inline or self._is_little_work(action, str(first), str(second)):
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def _is_little_work(self, action: int, first: str, second: str) -> bool:
        """Count the work of one part of a query."""
        if action == sqlite3.SQLITE_FUNCTION:
            self._work += _WORK.get(second.lower(), _INLINE_WORK + 1)
        elif action == sqlite3.SQLITE_READ and first in self._virtual_tables:
            self._work += _INLINE_WORK + 1
        elif action == sqlite3.SQLITE_SELECT:
            self._work += _SELECT_WORK
        else:
            self._work += 1
            if first in self._tables:
                self.tables_read.add(self._tables[first])
        return self._work <= _INLINE_WORK


_lock = threading.Lock()
_idle: list[Connection] = []
"""The connections without a query, the least recently used first."""


def acquire(
    path: str, deadline: float, stops: Any = (), *, inline: bool = True, signature: tuple[int, ...] | None = None
) -> Connection:
    """A connection for a query that begins now, to be given to :func:`release` afterwards.

    The query ends at ``deadline`` (of perf_counter), or when one of ``stops`` is set. Without the ``signature`` of the
    file it is asked for. Raises OSError, sqlite3.Error and :class:`StoppedError`.
    """
    while True:
        with _lock:
            fits = (other for other in reversed(_idle) if other.path == path and other.inline == inline)
            if connection := next(fits, None):
                _idle.remove(connection)
        if connection is None:
            return Connection(path, deadline, stops, inline=inline)
        if connection.raw.is_current(signature):
            connection.start(deadline, stops)
            return connection
        connection.close()


def release(connection: Connection) -> None:
    """Return a connection to the pool."""
    with _lock:
        _idle.append(connection)
        unused = _idle.pop(0) if len(_idle) > _IDLE_CONNECTIONS else None
    if unused is not None:
        unused.close()


def _drop_pool() -> None:
    global _idle, _lock
    _idle, _lock = [], threading.Lock()


# SQLite forbids carrying a connection into a forked process.
os.register_at_fork(after_in_child=_drop_pool)
