"""Runs an agent's SQL, read-only and within limits.

An agent's SQL is untrusted and often wrong, and a policy in training exploits every gap. So SQLite itself refuses
everything but reads (:mod:`groundwire.tools.sql.connections`), a query that could take very long or much memory runs
in a process of its own (:mod:`groundwire.tools.sql.query`), and an error message tells the agent how to
continue (:mod:`groundwire.tools.sql.errors`).
"""

from groundwire.tools.sql.copies import DatabaseCopies, DatabaseStates
from groundwire.tools.sql.errors import (
    DatabaseError,
    NotAllowedError,
    QueryError,
    QueryTimeoutError,
    SqlError,
    readable,
)
from groundwire.tools.sql.query import (
    MAX_JUDGED_BYTES,
    MAX_JUDGED_ROWS,
    QueryResult,
    is_sqlite,
    render,
    run_query,
    sorted_row,
)

__all__ = [
    "MAX_JUDGED_BYTES",
    "MAX_JUDGED_ROWS",
    "DatabaseCopies",
    "DatabaseError",
    "DatabaseStates",
    "NotAllowedError",
    "QueryError",
    "QueryResult",
    "QueryTimeoutError",
    "SqlError",
    "is_sqlite",
    "readable",
    "render",
    "run_query",
    "sorted_row",
]
