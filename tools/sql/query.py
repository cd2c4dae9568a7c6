"""Runs one SQL statement, read-only and within limits."""

from __future__ import annotations

import _thread
import marshal
import os
import re
import signal
import sqlite3
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groundwire.tools.daemon_threads import fulfil
from groundwire.tools.infrastructure import is_sqlite_failure
from groundwire.tools.machine import processors
from groundwire.tools.sql import connections
from groundwire.tools.sql.catalog import Catalog, is_damage, limit_heap, read_catalog
from groundwire.tools.sql.errors import (
    DatabaseError,
    NotAllowedError,
    QueryError,
    QueryTimeoutError,
    SqlError,
    timeout_error,
    unreadable,
)
from groundwire.tools.sql.opening import SQLITE_ERRORS, sqlite_message, without_waiting
from groundwire.tools.text import with_reasons
from groundwire.tools.worker_process import WorkerEndedError, WorkerPool, answer_requests, time_limit

MAX_JUDGED_ROWS, MAX_JUDGED_BYTES = 250_000, 4_000_000
"""The largest result that is compared with another: twenty times the largest of Spider. As Python objects the bytes are
ten to twenty times as many, and there are two results."""
_IOERR_WRITE = 10 | 3 << 8
_QUERY = re.compile(r"\s*(--[^\n]*\n\s*)*(select|with)\b", re.IGNORECASE)
_SIGNAL_CHECK_S = 0.1
_MIN_SIZE, _NUMBER_SIZE = 4, 8  # an object of Python takes 50 bytes at least
_MIN_TIME_S = 0.001
workers = WorkerPool("groundwire.tools.sql.query", size=max(8, processors()), max_idle=2)
"""The processes of queries that may hold SQLite for long. A start takes as long as hundreds of queries."""

_KINDS = {kind: str(kind) for kind in (type(None), int, float, str, bytes)}
Rows = list[tuple[Any, ...]]
_ERRORS = {error.__name__: error for error in (SqlError, NotAllowedError, DatabaseError)}


@dataclass(frozen=True)
class QueryResult:
    """The rows of a query: values are None, int, float, str or bytes."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    truncated: bool
    """True if ``max_rows`` or ``max_bytes`` cut the rows."""
    elapsed_s: float
    vm_steps: int = 0
    """Steps of SQLite's virtual machine up to the last row, in hundreds: a measure of work that does not depend on the
    machine, only on the file and the version of SQLite."""
    tables: frozenset[str] = frozenset()
    """The tables that the query reads, or a part that SQLite leaves out, in lower case; none if the database has views.
    """


def is_query(text: str) -> bool:
    """Whether ``text`` begins like an SQL query."""
    return _QUERY.match(text) is not None


def run_query(
    database: str | Path,
    sql: str,
    *,
    timeout_s: float = 5.0,
    max_rows: int = 10_000,
    max_bytes: int = 8_000_000,
    cancelled: threading.Event | None = None,
    signature: tuple[int, ...] | None = None,
    count_steps: bool = True,
) -> QueryResult:
    """Run one read-only statement on the SQLite file ``database`` and return its first rows.

    ``max_bytes`` counts the characters of text and the bytes of blobs, at least four of each, and eight for any other
    value. Another thread may set ``cancelled``: the query then stops within about ten milliseconds, with
    :class:`QueryTimeoutError`. ``signature`` is the file's, if the caller has just asked for it. Without
    ``count_steps`` a heavy query takes a fifth less time, and its ``vm_steps`` are not exact. Raises a
    :class:`QueryError`. No statement can change or create a file.
    """
    if len(sql) > connections.MAX_SQL_LENGTH:
        raise SqlError(f"the query is too long: {len(sql)} characters, at most {connections.MAX_SQL_LENGTH}")
    try:
        sql.encode()  # sqlite3 of Python 3.10 has a misleading message for this
    except UnicodeEncodeError as error:
        raise SqlError(f"the query is not Unicode at character {error.start}: {error.reason}") from error
    path = os.fspath(database)

    def query(*stops: threading.Event) -> QueryResult:
        if cancelled is not None:
            stops = (cancelled, *stops)
        started = time.perf_counter()
        try:
            limits = timeout_s, max_rows, max_bytes
            return run_here(path, sql, *limits, stops, signature=signature, count_steps=count_steps)
        except connections.NeedsProcessError:
            result = _run_in_process((path, sql, max_rows, max_bytes), started, timeout_s, stops)
            return replace(result, elapsed_s=time.perf_counter() - started)

    if threading.current_thread() is not threading.main_thread():
        return query()
    # Signal handlers run in the main thread. SQLite swallows an exception that is raised inside its callbacks, so there
    # Ctrl-C would look like a failed query.
    abandoned, answer, ended = threading.Event(), Future[QueryResult](), _thread.allocate_lock()
    ended.acquire()

    def run() -> None:
        fulfil(answer, lambda: query(abandoned))
        ended.release()

    try:
        # Thread.start() and Future.result() take longer, and must not be interrupted at some points.
        _thread.start_new_thread(run, ())
        # A signal just before a wait without timeout would be handled after the query only.
        while not ended.acquire(timeout=_SIGNAL_CHECK_S):
            pass
        return answer.result()
    except BaseException:
        abandoned.set()
        raise


def run_here(
    path: str,
    sql: str,
    timeout_s: float,
    max_rows: int,
    max_bytes: int,
    stops: tuple[threading.Event, ...] = (),
    *,
    inline: bool = True,
    signature: tuple[int, ...] | None = None,
    count_steps: bool = True,
) -> QueryResult:
    """The result of a query that runs in this process.

    With ``inline`` raises :class:`groundwire.tools.sql.connections.NeedsProcessError` for a query that may exceed its
    deadline by much or needs much memory. Raises a :class:`QueryError`.
    """
    if inline:
        connections.check_inline(sql)
    started = time.perf_counter()
    with without_waiting(path):
        try:
            conn = connections.acquire(path, started + timeout_s, stops, inline=inline, signature=signature)
        except connections.StoppedError as error:
            cancelled = any(stop.is_set() for stop in stops)
            if inline and not cancelled and time.perf_counter() < started + timeout_s:
                raise connections.NeedsProcessError from error
            raise timeout_error(timeout_s, cancelled=cancelled) from error
        except (OSError, *SQLITE_ERRORS, MemoryError) as error:
            raise unreadable(path, error) from error
        try:
            conn.count_steps(sql, exactly=count_steps)
            names, rows, truncated = _read(conn, sql, max_rows, max_bytes)
            conn.raw.check_unchanged()
            elapsed_s, tables = time.perf_counter() - started, frozenset(conn.tables_read)
            return QueryResult(names, rows, truncated, elapsed_s, conn.vm_steps, tables)
        except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as error:
            if inline and conn.needs_process(error):
                raise connections.NeedsProcessError from error
            raise _query_error(conn, sql, error, timeout_s) from error
        except OSError as error:
            raise unreadable(path, error) from error
        finally:
            connections.release(conn)


def _read(conn: connections.Connection, sql: str, max_rows: int, max_bytes: int) -> tuple[list[str], Rows, bool]:
    cursor = conn.raw.cursor()
    try:
        cursor.execute(sql)
        if cursor.description is None:
            raise NotAllowedError("nothing to read: write one SELECT statement")
        rows, truncated = _fetch(cursor, conn.max_value, max_rows, max_bytes)
        return [column[0] for column in cursor.description], rows, truncated
    except sqlite3.OperationalError as error:
        if not conn.can_drop_bytes(error):
            raise
    finally:
        cursor.close()
    return _read(conn, sql, max_rows, max_bytes)


def _run_in_process(
    query: tuple[str, str, int, int], started: float, timeout_s: float, stops: tuple[threading.Event, ...]
) -> QueryResult:
    deadline = started + timeout_s

    def request() -> bytes:
        return marshal.dumps((*query, max(deadline - time.perf_counter(), _MIN_TIME_S)))

    try:
        cancelled = (lambda: any(stop.is_set() for stop in stops)) if stops else None
        answer = workers.ask(request, deadline=deadline, cancelled=cancelled)
    except (WorkerEndedError, TimeoutError) as error:
        # The status is lost if other code waits for every child process.
        if isinstance(error, TimeoutError) or error.timed_out or time.perf_counter() > deadline:
            raise timeout_error(timeout_s) from error
        if error.crashed:
            raise SqlError("the query crashes SQLite") from error
        raise DatabaseError(f"the query failed: {error}") from error
    except OSError as error:
        raise DatabaseError(f"no process can be started for the query: {error}") from error
    if answer is None:
        raise timeout_error(timeout_s, cancelled=True)
    kind, *values = marshal.loads(answer)  # noqa: S302 - from our own process
    if kind == QueryTimeoutError.__name__:
        raise timeout_error(timeout_s)
    if kind:
        raise _ERRORS[kind](*values)
    return QueryResult(*values)


def _query_error(conn: connections.Connection, sql: str, error: Exception, timeout_s: float) -> QueryError:
    """The error of a query that SQLite ended with ``error`` on the connection ``conn``."""
    message = sqlite_message(error)
    code: int = getattr(error, "sqlite_errorcode", 0)
    result: QueryError
    if conn.stopped:
        result = timeout_error(timeout_s, cancelled=conn.cancelled)
    elif conn.refused_function:
        result = SqlError(f"the function {conn.refused_function} is not available")
    elif conn.refused and is_query(sql) and (skipped := _skipped_tables(conn.path, sql)):
        result = SqlError(f"a table of the query is broken{skipped}")  # its module tries to make it anew
    elif conn.refused:
        result = NotAllowedError(f"{conn.refused} is not allowed: write one SELECT statement")
    elif message == "You can only execute one statement at a time.":
        result = NotAllowedError("only one statement at a time: write a single SELECT")
    elif isinstance(error, MemoryError) or code == connections.IOERR_NOMEM:
        result = SqlError("the query needs too much memory")
    elif code == _IOERR_WRITE or message == "database or disk is full":
        # SQLite writes nothing but the query's own temporary files.
        result = SqlError("the query needs too much temporary storage")
    elif code == connections.TOOBIG or message == "string or blob too big":
        result = SqlError(f"a value is too big: at most {connections.MAX_VALUE_LENGTH:,} bytes can be read or computed")
    # On a read-only connection the second is about a database that a crashed writer left to be repaired.
    elif is_sqlite_failure(error) or message == "attempt to write a readonly database":
        skipped = _skipped_tables(conn.path, sql) if is_damage(error) else ""
        result = SqlError(message + skipped) if skipped else unreadable(conn.path, error)
    else:
        result = SqlError(message + _hint(conn.path, sql, message))
    return result


def _skipped_tables(path: str, sql: str) -> str:
    """The tables in a query that cannot be used, and why; empty if there are none."""
    words = _words(sql)
    skipped = {name: reason for name, reason in _catalog(path).skipped.items() if name.lower() in words}
    return f". Cannot be used: {with_reasons(skipped)}" if skipped else ""


def _catalog(path: str) -> Catalog:
    with suppress(DatabaseError):
        return read_catalog(path)
    return Catalog({}, {})


def _words(sql: str) -> set[str]:
    return set(re.findall(r"\w+", sql.lower()))


def _hint(path: str, sql: str, message: str) -> str:
    """The existing names, for an error about an unknown one."""
    kind, _, name = message.partition(": ")
    if kind not in ("no such table", "no such column"):
        return ""
    schema, words = {table.name: table.names for table in _catalog(path).tables.values()}, _words(sql)
    tables = [table for table in schema if table.lower() in words or not table.isidentifier()]
    if kind == "no such table" or not tables:
        return f". Tables: {', '.join(schema) or 'none'}{_skipped_tables(path, sql)}"
    qualifier = name.rpartition(".")[0].lower()
    if qualifier:
        aliased = {table.lower() for table in re.findall(rf"(\w+)\W+(?:as\s+)?{re.escape(qualifier)}\b", sql.lower())}
        tables = [table for table in tables if table.lower() in aliased | {qualifier}] or tables
    return "".join(f". Columns of {table}: {', '.join(schema[table])}" for table in tables)


def _fetch(cursor: sqlite3.Cursor, max_value: int, max_rows: int, max_bytes: int) -> tuple[Rows, bool]:
    rows, left = Rows(), max_bytes
    # As many rows as fit whatever is in them; these are counted if more follow.
    while number := min(left // (max_value * len(cursor.description)), max_rows + 1 - len(rows)):
        read = cursor.fetchmany(number)
        rows += read
        if len(read) < number or len(rows) > max_rows:
            return rows[:max_rows], len(rows) > max_rows
        left -= sum(map(_bytes_of, read))
    for row in cursor:
        left -= _bytes_of(row)
        if left < 0 or len(rows) == max_rows:
            return rows, True
        rows.append(row)
    return rows, False


def _bytes_of(row: tuple[Any, ...]) -> int:
    total = 0
    for value in row:
        kind = value.__class__
        size = len(value) if kind is str or kind is bytes else _NUMBER_SIZE
        total += size if size > _MIN_SIZE else _MIN_SIZE
    return total


def sorted_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values in an order that does not depend on that of the columns, as Spider's evaluator sorts them."""
    return tuple(sorted(row, key=lambda value: str(value) + _KINDS[value.__class__]))


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
            parts = parts or [text[: max(max_chars - used, 0)] + "..."]
            break
        parts.append(text)
        used += len(text) + 2
    hidden = len(result.rows) - len(parts)
    if hidden:
        parts.append(f"... {hidden} more row{'s' if hidden > 1 else ''}{', and more' if result.truncated else ''}")
    elif result.truncated:
        parts.append("... and more rows")
    return f"{header}[{', '.join(parts)}]"


# A query normally ends at its deadline by SQLite's own check, which lets the process live.
_KILL_FACTOR, _KILL_MARGIN_S = 1.1, 0.05
# Of each temporary file. A sort can write a gigabyte in a second, and deleting the file takes a part of that time.
_MAX_FILE_BYTES = 256 * 1024 * 1024


def serve(descriptor: int, parent: int) -> None:
    """Answer the queries that arrive."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error instead
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = _MAX_FILE_BYTES if hard_limit == resource.RLIM_INFINITY else min(_MAX_FILE_BYTES, hard_limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
    limit_heap()
    answer_requests(_answer, descriptor, parent)


def _answer(request: bytes) -> bytes:
    path, sql, max_rows, max_bytes, timeout_s = marshal.loads(request)  # noqa: S302 - from our parent
    with time_limit(signal.ITIMER_REAL, timeout_s * _KILL_FACTOR + _KILL_MARGIN_S):
        try:
            result = run_here(path, sql, timeout_s, max_rows, max_bytes, inline=False)
            return marshal.dumps(("", *vars(result).values()))  # it takes less memory than pickle
        except QueryError as error:
            return marshal.dumps((type(error).__name__, str(error)))
