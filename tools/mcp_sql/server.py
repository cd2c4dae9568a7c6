"""The MCP server's tools: the only file that imports FastMCP.

The tools are written by hand over FastMCP's ``Tool`` rather than derived from function signatures: their schemas are in
every prompt of every agent that embeds them, and a missing argument is answered by a sentence instead of a validator's
report.

Every error that a model can do something about is a tool error (``isError``). So is a database that cannot be read,
since a protocol error ends the agent of most frameworks; ``_meta`` says which it was, for callers that must tell a
model's mistake from broken infrastructure: ``{"error": "sql" | "arguments" | "timeout" | "database"}``.

A query holds its thread until its deadline, so there are more threads than clients are expected to have slow queries:
the last one idle is the first one used again, and those unused for ten seconds end. Not many more, for each query
that runs has a connection (0.2 to 0.7 MB) and SQLite has one heap limit for all.
"""

from __future__ import annotations

import hmac
import math
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
import anyio.to_thread
from fastmcp import FastMCP
from fastmcp.exceptions import NotFoundError, ResourceError
from fastmcp.server.auth import AccessToken, TokenVerifier
from fastmcp.tools import Tool, ToolResult
from mcp_types import ToolAnnotations

from groundwire.tools import _readonly_sqlite
from groundwire.tools.mcp_sql.databases import Databases, UnknownDatabaseError
from groundwire.tools.schema import describe_table, table_info
from groundwire.tools.sql import DatabaseError, QueryError, QueryResult, QueryTimeoutError, render, run_query

__all__ = ["Limits", "sql_server"]

_THREADS = 100
_BLOB_BYTES = 32
_SHORTEST = 20

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one call may take: seconds for its query, rows read, characters answered."""

    timeout_s: float = 5.0
    max_rows: int = 1000
    max_chars: int = 2000


def sql_server(databases: Databases, *, limits: Limits, token: str | None = None) -> FastMCP:
    """A server that is ready to run: ``server.run(transport="stdio")``, or ``"http"``. With ``token`` HTTP needs it."""
    server: FastMCP = FastMCP(
        "sql",
        instructions="Read-only SQL on SQLite. Look at the tables before you write a query.",
        auth=_OneToken(token) if token else None,
    )
    desk = _Desk(databases, limits)
    for tool in _tools(desk):
        server.add_tool(tool)
    _resources(desk, server)
    return server


class _OneToken(TokenVerifier):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        if not hmac.compare_digest(token.encode(), self._token):
            return None
        return AccessToken(token=token, client_id="client", scopes=[])


class _Desk:
    """What the tools do, each in a thread that stops when its caller goes away."""

    def __init__(self, databases: Databases, limits: Limits) -> None:
        self.databases = databases
        self.limits = limits
        self._threads = anyio.CapacityLimiter(_THREADS)

    async def in_thread(self, work: Callable[[threading.Event], T]) -> T:
        cancelled = threading.Event()
        try:
            return await anyio.to_thread.run_sync(work, cancelled, abandon_on_cancel=True, limiter=self._threads)
        except MemoryError as error:  # of opening a connection: not this query's doing
            raise DatabaseError("the server is short of memory, try again in ten seconds") from error
        finally:
            cancelled.set()

    async def query(self, sql: str, database: str | None = None) -> ToolResult:
        def work(cancelled: threading.Event) -> QueryResult:
            path, limits = self.databases.path(database), self.limits
            return run_query(path, sql, timeout_s=limits.timeout_s, max_rows=limits.max_rows, cancelled=cancelled)

        return _rows(await self.in_thread(work), self.limits.max_chars)

    async def list_databases(self) -> ToolResult:
        return _names("databases", await self.in_thread(lambda _: self.databases.names()), self.limits.max_chars)

    async def list_tables(self, database: str | None = None) -> ToolResult:
        return _names("tables", await self.in_thread(lambda _: list(self._columns(database))), self.limits.max_chars)

    async def describe_table(self, table: str, database: str | None = None) -> ToolResult:
        def work(_: threading.Event) -> tuple[str, list[str]]:
            text = describe_table(self.databases.path(database), table)
            columns = {name.lower(): names for name, names in self._columns(database).items()}
            return text, columns.get(table.lower(), [])

        text, columns = await self.in_thread(work)
        limit = self.limits.max_chars
        cut = None
        if len(text) > limit:
            cut = f"{limit} of {len(text)} characters shown: SELECT the columns that you need to see their values."
            text = text[:limit]
        return _answer(text, {"columns": columns, "definition": text}, cut)

    async def schema(self, database: str | None = None) -> str:
        return (await self.in_thread(lambda _: table_info(self.databases.path(database)))).text

    def _columns(self, database: str | None) -> dict[str, list[str]]:
        path = str(self.databases.path(database))
        try:
            return _readonly_sqlite.columns(path, _readonly_sqlite.signature(path))
        except (OSError, sqlite3.Error) as error:
            raise DatabaseError(_readonly_sqlite.broken(path, error)) from error


def _answer(text: str, structured: dict[str, Any], cut: str | None) -> ToolResult:
    """Both forms end with what was cut: some clients show their model the one, some the other."""
    if cut is None:
        return ToolResult(text, structured)
    return ToolResult(f"{text}\n{cut}", {**structured, "cut": cut})


def _rows(result: QueryResult, max_chars: int) -> ToolResult:
    rows: list[tuple[Any, ...]] = []
    left = max_chars - sum(len(name) + 2 for name in result.columns)
    shortened = False
    for row in result.rows:
        shown = tuple(_jsonable(value) for value in row)
        size = len(repr(shown)) + 2
        if not rows and size > left:  # something must be shown of the first row
            room = max(left // len(shown), _SHORTEST)
            shortened = any(isinstance(value, str) and len(value) > room for value in shown)
            shown = tuple(_shortened(value, room) for value in shown)
        elif size > left:
            break
        rows.append(shown)
        left -= size
    cuts = []
    if shortened:
        cuts.append("Long values are shortened: ask for a part with substr().")
    if len(rows) < len(result.rows) or result.truncated:
        of = f"more than {len(result.rows)}" if result.truncated else f"{len(result.rows)}"
        cuts.append(f"{len(rows)} of {of} rows shown: ask for less with WHERE, LIMIT, fewer columns or an aggregate.")
    text = render(QueryResult(result.columns, rows, False, 0.0), max_chars=sys.maxsize, columns=True)
    return _answer(text, {"columns": result.columns, "rows": [list(row) for row in rows]}, " ".join(cuts) or None)


def _names(kind: str, names: list[str], max_chars: int) -> ToolResult:
    left = max_chars
    shown: list[str] = []
    for name in names:
        left -= len(name) + 2
        if left < 0 and shown:
            break
        shown.append(name)
    cut = None
    if len(shown) < len(names):
        cut = f"{len(shown)} of {len(names)} {kind} shown."
        if kind == "tables":
            cut += " Others: SELECT name FROM sqlite_master WHERE name LIKE '...'"
    return _answer(", ".join(shown) or f"There are no {kind}.", {kind: shown}, cut)


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"x'{value[:_BLOB_BYTES].hex()}'" + (f"... {len(value)} bytes" if len(value) > _BLOB_BYTES else "")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _shortened(value: Any, room: int) -> Any:
    if isinstance(value, str) and len(value) > room:
        return f"{value[:room]}... {len(value)} characters"
    return value


class _HandWritten(Tool):
    """A tool whose schema is as written, and whose arguments are checked in words."""

    work: Callable[..., Awaitable[ToolResult]]
    root: str
    """The database's path on the server: its clients need not know it."""

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        wanted = self.parameters["properties"]
        try:
            if set(arguments) != set(wanted) or not all(isinstance(value, str) for value in arguments.values()):
                raise _ArgumentsError(self.name, list(wanted), arguments)
            return await self.work(**arguments)
        except QueryError as error:
            message = str(error).replace(self.root, "...")
            if isinstance(error, DatabaseError):
                message += ". This is not the query's fault."
            return ToolResult(message, meta={"error": _kind(error)}, is_error=True)


class _ArgumentsError(QueryError):
    def __init__(self, tool: str, wanted: list[str], given: Mapping[str, Any]) -> None:
        needs = " and ".join(f"{name!r} (a string)" for name in wanted) or "no arguments"
        got = ", ".join(f"{name!r} ({type(value).__name__})" for name, value in given.items()) or "nothing"
        only = " and nothing else" if wanted and set(given) - set(wanted) else ""
        super().__init__(f"{tool} needs {needs}{only}; it was given {got}")


def _kind(error: QueryError) -> str:
    if isinstance(error, DatabaseError):
        return "database"
    if isinstance(error, QueryTimeoutError):
        return "timeout"
    return "arguments" if isinstance(error, (_ArgumentsError, UnknownDatabaseError)) else "sql"


_STRINGS = {"type": "array", "items": {"type": "string"}}
_CUT = {"type": "string", "description": "What was left out"}
_READ_ONLY = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)


def _tools(desk: _Desk) -> list[Tool]:
    where = {"database": "Name of the database"} if desk.databases.is_folder else {}

    def tool(
        work: Callable[..., Awaitable[ToolResult]],
        description: str,
        *,
        name: str = "",
        takes: dict[str, str],
        gives: dict[str, Any],
    ) -> Tool:
        properties = {key: {"type": "string", "description": about} for key, about in takes.items()}
        return _HandWritten(
            name=name or work.__name__,
            description=description,
            parameters={"type": "object", "properties": properties, "required": list(takes)},
            output_schema={"type": "object", "properties": {**gives, "cut": _CUT}, "required": list(gives)},
            annotations=_READ_ONLY,
            work=work,
            root=str(desk.databases.root),
        )

    tools = [
        tool(
            desk.query,
            "Run one read-only SQL query (SQLite) and return its rows.",
            name="query_database_by_sql",
            takes={**where, "sql": "One SELECT statement"},
            gives={"columns": _STRINGS, "rows": {"type": "array", "items": {"type": "array"}}},
        ),
        tool(desk.list_tables, "List the tables and views.", takes=where, gives={"tables": _STRINGS}),
        tool(
            desk.describe_table,
            "Show a table's columns, types, keys and a few values of each column.",
            takes={**where, "table": "Name of the table"},
            gives={"columns": _STRINGS, "definition": {"type": "string"}},
        ),
    ]
    if desk.databases.is_folder:
        tools.insert(0, tool(desk.list_databases, "List the databases.", takes={}, gives={"databases": _STRINGS}))
    return tools


def _resources(desk: _Desk, server: FastMCP) -> None:
    """The whole schema as text, for clients that put it into the context themselves."""
    about = {"description": "The tables with their keys and a few values of each column", "mime_type": "text/plain"}

    async def schema(database: str) -> str:
        try:
            return await desk.schema(database)
        except UnknownDatabaseError as error:
            raise NotFoundError(str(error)) from error
        except QueryError as error:
            raise ResourceError(str(error).replace(str(desk.databases.root), "...")) from error

    if desk.databases.is_folder:
        server.resource("sqlite:///{database*}/schema", name="schema", **about)(schema)
    else:
        (name,) = desk.databases.names()
        server.resource(f"sqlite:///{quote(name)}/schema", name="schema", **about)(partial(schema, name))
