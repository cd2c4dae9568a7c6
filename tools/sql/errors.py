"""Why a query failed, with a message that tells the agent how to continue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from groundwire.tools.errors import BrokenResourceError
from groundwire.tools.sql.opening import SQLITE_ERRORS, TO_BE_REPAIRED, sqlite_message
from groundwire.tools.text import printable, visible

_REASON_CHARS = 300


class QueryError(Exception):
    """A query failed. The message is written for the agent; no text that it quotes steers a terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


class SqlError(QueryError):
    """The SQL is wrong: a syntax error, an unknown name, a value that is too large."""


class NotAllowedError(QueryError):
    """The SQL does more than read, or is more than one statement."""


class QueryTimeoutError(QueryError):
    """The query exceeded its deadline, or its caller cancelled it."""


class DatabaseError(QueryError, BrokenResourceError):
    """The database cannot be read: a failure of the infrastructure, not of the agent."""


def unreadable(path: str, error: Exception) -> DatabaseError:
    """The error of a database that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        return DatabaseError(f"no database at {printable(path)}")
    reason = printable(getattr(error, "strerror", None) or sqlite_message(error) or type(error).__name__)
    if reason == "attempt to write a readonly database":
        reason = TO_BE_REPAIRED
    if len(reason) > _REASON_CHARS:
        reason = f"{reason[:_REASON_CHARS]}..."
    return DatabaseError(f"the database {printable(path)} cannot be read: {reason}")


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Raise :class:`DatabaseError` if the file ``path`` turns out to be missing or no database that can be read."""
    try:
        yield
    except (OSError, *SQLITE_ERRORS, MemoryError) as error:
        raise unreadable(path, error) from error


def timeout_error(timeout_s: float, *, cancelled: bool = False) -> QueryTimeoutError:
    """The error of a query that was stopped."""
    return QueryTimeoutError(f"the query {'was cancelled' if cancelled else f'ran longer than {timeout_s:g} s'}")
