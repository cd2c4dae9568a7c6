"""Run one SQL statement, read-only and within limits.

An agent's SQL is untrusted and often wrong, and a policy in training exploits every gap. So SQLite itself refuses
everything but reads (see :mod:`groundwire.tools._readonly_sqlite`), a query that could take very long or much memory
runs in a process of its own (see :mod:`groundwire.tools._query_process`), and an error message tells the agent how to
continue::

    QueryError
    ├── SqlError            the SQL is wrong; the agent can repair it
    ├── NotAllowedError     the SQL does more than read; the agent can write another
    ├── QueryTimeoutError   stopped by its deadline or its caller; the agent can write a cheaper one
    └── DatabaseError       the file is missing, damaged or locked; not the agent's fault
"""

from __future__ import annotations

import _thread
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groundwire.tools import _query_process, _readonly_sqlite
from groundwire.tools.daemon_threads import fulfil

__all__ = [
    "DatabaseError",
    "NotAllowedError",
    "QueryError",
    "QueryResult",
    "QueryTimeoutError",
    "SqlError",
    "is_sqlite",
    "render",
    "run_query",
]


_MAGIC = b"SQLite format 3\0"
_SIGNAL_CHECK_S = 0.1


class QueryError(Exception):
    """A query failed. The message is written for the agent."""


class SqlError(QueryError):
    """The SQL is wrong: a syntax error, an unknown name, a value that is too large."""


class NotAllowedError(QueryError):
    """The SQL does more than read, or is more than one statement."""


class QueryTimeoutError(QueryError):
    """The query exceeded its deadline, or its caller cancelled it."""


class DatabaseError(QueryError):
    """The database cannot be read: a failure of the infrastructure, not of the agent."""


@dataclass(frozen=True)
class QueryResult:
    """The rows of a query: values are None, int, float, str or bytes."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    truncated: bool
    """True if ``max_rows`` or ``max_bytes`` cut the rows."""
    elapsed_s: float


def is_sqlite(path: str | Path) -> bool:
    """Whether ``path`` is a readable file that begins like a SQLite database."""
    try:
        if not os.path.isfile(path):  # opening a pipe would wait for its writer
            return False
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def run_query(
    database: str | Path,
    sql: str,
    *,
    timeout_s: float = 5.0,
    max_rows: int = 10_000,
    max_bytes: int = 8_000_000,
    cancelled: threading.Event | None = None,
) -> QueryResult:
    """Run one read-only statement on the SQLite file ``database`` and return its first rows.

    ``max_bytes`` counts the characters of text, the bytes of blobs and eight for any other value. Another thread may
    set ``cancelled``: the query then stops within about ten milliseconds, with :class:`QueryTimeoutError`. Raises a
    :class:`QueryError`. No statement can change or create a file.
    """

    def query(*stops: threading.Event) -> QueryResult:
        if cancelled is not None:
            stops = (cancelled, *stops)
        return _run(os.fspath(database), sql, timeout_s, max_rows, max_bytes, stops)

    return _run_in_other_thread(query) if threading.current_thread() is threading.main_thread() else query()


def _run_in_other_thread(query: Callable[[threading.Event], QueryResult]) -> QueryResult:
    """Run a query of the main thread in another thread.

    Signal handlers run in the main thread. SQLite swallows an exception that is raised inside its callbacks, so Ctrl-C
    would look like a failed query.
    """
    abandoned, answer, done = threading.Event(), Future[QueryResult](), _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        fulfil(answer, lambda: query(abandoned))
        done.release()

    try:
        # Thread.start() and Future.result() must not be interrupted at some points: locks would stay held.
        _thread.start_new_thread(run, ())
        # A signal just before a wait without timeout would be handled after the query only.
        while not done.acquire(timeout=_SIGNAL_CHECK_S):
            pass
        return answer.result()
    except BaseException:
        abandoned.set()
        raise


def _run(
    path: str, sql: str, timeout_s: float, max_rows: int, max_bytes: int, stops: tuple[threading.Event, ...]
) -> QueryResult:
    if len(sql) > _readonly_sqlite.MAX_SQL_LENGTH:
        raise SqlError(f"the query is too long: {len(sql)} characters, at most {_readonly_sqlite.MAX_SQL_LENGTH}")
    try:
        sql.encode()  # sqlite3 of Python 3.10 has a misleading message for this
    except UnicodeEncodeError as error:
        raise SqlError(f"the query is not Unicode at character {error.start}: {error.reason}") from error
    started = time.perf_counter()
    try:
        answer = run_here(path, sql, timeout_s, max_rows, max_bytes, stops)
    except _readonly_sqlite.NeedsProcessError:
        answer = _run_in_process((path, sql, max_rows, max_bytes), started, timeout_s, stops)
    return QueryResult(*answer, time.perf_counter() - started)


def run_here(
    path: str,
    sql: str,
    timeout_s: float,
    max_rows: int,
    max_bytes: int,
    stops: tuple[threading.Event, ...] = (),
    *,
    inline: bool = True,
) -> tuple[list[str], list[tuple[Any, ...]], bool]:
    """The columns, the rows and ``truncated`` of a query that runs in this process.

    With ``inline`` raises :class:`groundwire.tools._readonly_sqlite.NeedsProcessError` for a query that may exceed its
    deadline by much or needs much memory. Raises a :class:`QueryError`.
    """
    if inline:
        _readonly_sqlite.check_inline(sql)
    deadline = time.perf_counter() + timeout_s
    try:
        conn = _readonly_sqlite.acquire(path, inline=inline)
    except (OSError, sqlite3.Error, MemoryError) as error:
        raise DatabaseError(_readonly_sqlite.read_error(path, error)) from error
    cursor = conn.raw.cursor()
    try:
        conn.start(deadline, stops)
        cursor.execute(sql)
        if cursor.description is None:
            raise NotAllowedError("nothing to read: write one SELECT statement")
        rows, truncated = _fetch(cursor, max_rows, max_bytes)
        return [column[0] for column in cursor.description], rows, truncated
    except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as error:
        if inline and conn.needs_process(error):
            raise _readonly_sqlite.NeedsProcessError from error
        raise _query_error(conn, path, sql, error, timeout_s) from error
    finally:
        cursor.close()
        _readonly_sqlite.release(conn)


def _run_in_process(
    query: _query_process.Query, started: float, timeout_s: float, stops: tuple[threading.Event, ...]
) -> tuple[list[str], list[tuple[Any, ...]], bool]:
    try:
        cancelled = (lambda: any(stop.is_set() for stop in stops)) if stops else None
        answer = _query_process.run(query, started + timeout_s, cancelled)
    except _query_process.KilledError as error:
        # The status is lost if other code waits for every child process.
        if error.timed_out or time.perf_counter() > started + timeout_s:
            raise _timeout_error(timeout_s) from error
        if error.crashed:
            raise SqlError("the query crashes SQLite") from error
        raise DatabaseError(str(error)) from error
    except TimeoutError as error:
        raise _timeout_error(timeout_s) from error
    except OSError as error:
        raise DatabaseError(f"no process can be started for the query: {error}") from error
    if answer is None:
        raise _timeout_error(timeout_s, cancelled=True)
    kind, *values = answer
    if kind == QueryTimeoutError.__name__:
        raise _timeout_error(timeout_s)
    if kind is not None:
        raise _ERRORS[kind](*values)
    columns, rows, truncated = values
    return columns, rows, truncated


_ERRORS = {error.__name__: error for error in (SqlError, NotAllowedError, DatabaseError)}


def _timeout_error(timeout_s: float, *, cancelled: bool = False) -> QueryTimeoutError:
    return QueryTimeoutError(f"the query {'was cancelled' if cancelled else f'ran longer than {timeout_s:g} s'}")


def _fetch(cursor: sqlite3.Cursor, max_rows: int, max_bytes: int) -> tuple[list[tuple[Any, ...]], bool]:
    rows: list[tuple[Any, ...]] = []
    left = max_bytes
    for row in cursor:
        for value in row:
            kind = value.__class__
            left -= len(value) if kind is str or kind is bytes else 8
        if left < 0 or len(rows) == max_rows:
            return rows, True
        rows.append(row)
    return rows, False


def render(result: QueryResult, *, max_chars: int = 2000, columns: bool = False) -> str:
    """The rows as text for an agent: ``[('a', 1), ('b', 2)]``, at most about ``max_chars`` characters.

    Rows that do not fit are counted: ``[('a', 1), ... 41 more rows]``. With ``columns`` the first line has the column
    names.
    """
    header = f"({', '.join(result.columns)})\n" if columns else ""
    parts: list[str] = []
    used = len(header) + 2
    for row in result.rows:
        text = repr(row)
        if used + len(text) > max_chars:
            if not parts:
                parts.append(text[: max(max_chars - used, 0)] + "...")
            break
        parts.append(text)
        used += len(text) + 2
    hidden = len(result.rows) - len(parts)
    if hidden:
        parts.append(f"... {hidden} more row{'s' if hidden > 1 else ''}{', and more' if result.truncated else ''}")
    elif result.truncated:
        parts.append("... and more rows")
    return f"{header}[{', '.join(parts)}]"


# SQLite's codes of failures that no query can cause, as numbers: Python 3.10 has no names for them. A read-only
# connection reports READONLY only for a database that a crashed writer left to be repaired.
_PERM, _BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _PROTOCOL = 3, 5, 6, 8, 10, 11, 13, 14, 15
_SCHEMA, _NOLFS, _NOTADB = 17, 22, 26
_INFRASTRUCTURE = frozenset(
    {_PERM, _BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _CANTOPEN, _PROTOCOL, _SCHEMA, _NOLFS, _NOTADB}
)
_IOERR_WRITE = _IOERR | 3 << 8
# Python 3.10 has no codes. A message that quotes a name or a value of the query is never equal to one of these.
_INFRASTRUCTURE_MESSAGES = {
    "access permission denied",
    "attempt to write a readonly database",
    "database disk image is malformed",
    "database is locked",
    "database schema has changed",
    "database table is locked",
    "disk I/O error",
    "file is not a database",
    "large file support is disabled",
    "locking protocol",
    "unable to open database file",
}


def _query_error(
    conn: _readonly_sqlite.Connection, path: str, sql: str, error: Exception, timeout_s: float
) -> QueryError:
    message = str(error)
    code: int = getattr(error, "sqlite_errorcode", 0)
    result: QueryError
    if conn.stopped:
        result = _timeout_error(timeout_s, cancelled=conn.cancelled)
    elif conn.refused_function:
        result = SqlError(f"the function {conn.refused_function} is not available")
    elif conn.refused:
        result = NotAllowedError(f"{conn.refused} is not allowed: write one SELECT statement")
    elif message == "You can only execute one statement at a time.":
        result = NotAllowedError("only one statement at a time: write a single SELECT")
    elif isinstance(error, MemoryError) or code == _readonly_sqlite.IOERR_NOMEM:
        result = SqlError("the query needs too much memory")
    elif code == _IOERR_WRITE or code & 0xFF == _FULL:  # SQLite writes nothing but the query's own temporary files
        result = SqlError("the query needs too much temporary storage")
    elif code & 0xFF in _INFRASTRUCTURE or message in _INFRASTRUCTURE_MESSAGES:
        result = DatabaseError(f"the database {path} cannot be read: {message}")
    else:
        result = SqlError(message + _hint(path, conn.signature, sql, message))
    return result


def _hint(path: str, signature: tuple[int, ...], sql: str, message: str) -> str:
    """The existing names, for an error about an unknown one."""
    kind, _, name = message.partition(": ")
    if kind not in ("no such table", "no such column"):
        return ""
    try:
        schema = _readonly_sqlite.columns(path, signature)
    except (OSError, sqlite3.Error):
        return ""
    words = set(re.findall(r"\w+", sql.lower()))
    tables = [table for table in schema if table.lower() in words or not table.isidentifier()]
    if kind == "no such table" or not tables:
        return f". Tables: {', '.join(schema) or 'none'}"
    qualifier = name.rpartition(".")[0].lower()
    if qualifier:
        aliased = {table.lower() for table in re.findall(rf"(\w+)\W+(?:as\s+)?{re.escape(qualifier)}\b", sql.lower())}
        tables = [table for table in tables if table.lower() in aliased | {qualifier}] or tables
    return "".join(f". Columns of {table}: {', '.join(schema[table])}" for table in tables)
