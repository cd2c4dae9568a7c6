"""Runs an agent's SQL, read-only and within limits.

An agent's SQL is untrusted and often wrong, and a policy in training exploits every gap. So SQLite itself refuses
everything but reads (:mod:`groundwire.tools.sql.connections`), a file is checked before it is opened
(:mod:`groundwire.tools.sql.opening`), a query that could take very long or much memory runs in a process of its own
(:mod:`groundwire.tools.sql.query`), and an error message tells the agent how to continue. Of a schema all is read that
can be (:mod:`groundwire.tools.sql.catalog`).
"""

from groundwire.tools.sql.catalog import Catalog, TableDefinition, quote_identifier, read_catalog
from groundwire.tools.sql.copies import DatabaseCopies
from groundwire.tools.sql.errors import (
    DatabaseError,
    NotAllowedError,
    QueryError,
    QueryTimeoutError,
    SqlError,
    readable,
)
from groundwire.tools.sql.opening import SUFFIXES, file_problem, files_of, has_suffix, is_sqlite, signature
from groundwire.tools.sql.query import MAX_JUDGED_BYTES, MAX_JUDGED_ROWS, QueryResult, render, run_query, sorted_row

__all__ = [
    "MAX_JUDGED_BYTES",
    "MAX_JUDGED_ROWS",
    "SUFFIXES",
    "Catalog",
    "DatabaseCopies",
    "DatabaseError",
    "NotAllowedError",
    "QueryError",
    "QueryResult",
    "QueryTimeoutError",
    "SqlError",
    "TableDefinition",
    "file_problem",
    "files_of",
    "has_suffix",
    "is_sqlite",
    "quote_identifier",
    "read_catalog",
    "readable",
    "render",
    "run_query",
    "signature",
    "sorted_row",
]
