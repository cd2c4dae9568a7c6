"""Why a query failed, with a message that tells the agent how to continue."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from groundwire.tools.errors import BrokenResourceError
from groundwire.tools.infrastructure import is_sqlite_failure
from groundwire.tools.sql import connections

_IOERR_WRITE = 10 | 3 << 8


class QueryError(Exception):
    """A query failed. The message is written for the agent."""


class SqlError(QueryError):
    """The SQL is wrong: a syntax error, an unknown name, a value that is too large."""


class NotAllowedError(QueryError):
    """The SQL does more than read, or is more than one statement."""


class QueryTimeoutError(QueryError):
    """The query exceeded its deadline, or its caller cancelled it."""


class DatabaseError(QueryError, BrokenResourceError):
    """The database cannot be read: a failure of the infrastructure, not of the agent."""


def unreadable(path: str, error: Exception) -> DatabaseError:
    """The error of a database that cannot be opened."""
    exists = os.path.exists(path)
    return DatabaseError(f"the database {path} cannot be read: {error}" if exists else f"no database at {path}")


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Raise :class:`DatabaseError` if the file ``path`` turns out to be missing or no database that can be read."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise unreadable(path, error) from error


def timeout_error(timeout_s: float, *, cancelled: bool = False) -> QueryTimeoutError:
    """The error of a query that was stopped."""
    return QueryTimeoutError(f"the query {'was cancelled' if cancelled else f'ran longer than {timeout_s:g} s'}")


def query_error(conn: connections.Connection, path: str, sql: str, error: Exception, timeout_s: float) -> QueryError:
    """The error of a query that SQLite ended with ``error`` on the connection ``conn``."""
    message = str(error)
    code: int = getattr(error, "sqlite_errorcode", 0)
    result: QueryError
    if conn.stopped:
        result = timeout_error(timeout_s, cancelled=conn.cancelled)
    elif conn.refused_function:
        result = SqlError(f"the function {conn.refused_function} is not available")
    elif conn.refused:
        result = NotAllowedError(f"{conn.refused} is not allowed: write one SELECT statement")
    elif message == "You can only execute one statement at a time.":
        result = NotAllowedError("only one statement at a time: write a single SELECT")
    elif isinstance(error, MemoryError) or code == connections.IOERR_NOMEM:
        result = SqlError("the query needs too much memory")
    elif code == _IOERR_WRITE or message == "database or disk is full":
        # SQLite writes nothing but the query's own temporary files.
        result = SqlError("the query needs too much temporary storage")
    # On a read-only connection the second is about a database that a crashed writer left to be repaired.
    elif is_sqlite_failure(error) or message == "attempt to write a readonly database":
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
        schema = connections.columns(path, signature)
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
