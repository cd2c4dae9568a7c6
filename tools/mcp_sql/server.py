"""The tools of the MCP server. Only this module imports FastMCP.

The tools' schemas are written by hand and not derived from function signatures: they are in every prompt of every agent
that uses them, and a missing argument gets a short error message instead of a validator's report.

All errors are tool errors (``isError``), even an unreadable database, since most frameworks end the agent after a
protocol error. ``_meta`` has the kind, so that callers can separate a model's mistake from broken infrastructure:
``{"error": "sql" | "arguments" | "timeout" | "busy" | "database"}``.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
import anyio.to_thread
from fastmcp import FastMCP
from fastmcp.exceptions import NotFoundError, ResourceError, ToolError
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from fastmcp.tools import Tool, ToolResult
from mcp_types import ToolAnnotations

from groundwire.tools.machine import processors
from groundwire.tools.mcp_sql.databases import Databases, UnknownDatabaseError
from groundwire.tools.schema import describe_table, table_info
from groundwire.tools.sql import (
    DatabaseError,
    QueryError,
    QueryResult,
    QueryTimeoutError,
    read_catalog,
    render,
    run_query,
)
from groundwire.tools.terminal import version
from groundwire.tools.text import printable, with_reasons

_BLOB_BYTES = 32
_MIN_VALUE_CHARS = 20
_QUICK_S = 0.25
_QUICK_THREADS = 64
_MAX_WAITING_QUICK = 2000
_SLOW_THREADS = max(4, processors() // 2)
_MAX_WAITING_SLOW = 8 * _SLOW_THREADS

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one call: seconds of its query, rows read, characters of the answer."""

    timeout_s: float = 5.0
    max_rows: int = 1000
    max_chars: int = 2000


def sql_server(databases: Databases, *, limits: Limits) -> FastMCP:
    """A server to run: ``server.run(transport="stdio")``, or ``"http"``, behind a guard that checks the token."""
    functions = _Functions(databases, limits)
    server = _Server(
        _tools(functions),
        name="sql",
        instructions="Read-only SQL on SQLite. Look at the tables before you write a query.",
        version=version(),
    )
    server.add_middleware(_ShortNames(limits.max_chars))
    _resources(functions, server)
    return server


class _Server(FastMCP):
    """Has the same tools for every client: FastMCP imports a slow store to look up which a session has hidden."""

    def __init__(self, tools: Sequence[Tool], **options: Any) -> None:
        super().__init__(**options)
        self._fixed_tools = {tool.name: tool for tool in tools}

    async def list_tools(self, *, run_middleware: bool = True) -> Sequence[Tool]:
        return list(self._fixed_tools.values())

    async def get_tool(self, name: str, version: Any = None) -> Tool | None:
        return self._fixed_tools.get(name)


class _ShortNames(Middleware):
    """Refuses long names of tools and resources, because FastMCP repeats an unknown name."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars

    async def on_request(self, context: MiddlewareContext[Any], call_next: CallNext[Any, Any]) -> Any:
        for field, kind, error in (("name", "tool", ToolError), ("uri", "resource", ResourceError)):
            if len(name := str(getattr(context.message, field, ""))) > self._max_chars:
                raise error(f"unknown {kind}: {_shorten(name, self._max_chars)}")
        return await call_next(context)


class BusyError(QueryError):
    """A slow query cannot run, because too many others do; the agent can write a cheaper one."""


class _Lanes:
    """Runs blocking functions in threads, so that slow queries do not delay quick ones, also of the same client.

    The server cannot know who sends a query: one connection may serve a hundred agents, and one program may open a
    hundred connections. So queries are separated by their duration. Each runs for at most a quarter of a second in the
    quick lane. One that takes longer starts again in the slow lane, which runs few queries at once and lets a limited
    number wait; beyond that the server is busy. A function gets an event that is set when its caller is gone.
    """

    def __init__(self) -> None:
        self._quick, self._slow = anyio.CapacityLimiter(_QUICK_THREADS), anyio.CapacityLimiter(_SLOW_THREADS)
        self._slow_threads = anyio.CapacityLimiter(_SLOW_THREADS)

    async def run(self, work: Callable[[threading.Event], T]) -> T:
        """Run ``work``, which takes milliseconds, in the quick lane. Raises DatabaseError if too many are waiting."""
        if self._quick.statistics().tasks_waiting >= _MAX_WAITING_QUICK:
            raise DatabaseError(f"{_MAX_WAITING_QUICK} requests are waiting for the server, try again in ten seconds")
        return await _in_thread(work, self._quick)

    async def run_query(self, query: Callable[[threading.Event, float], T], timeout_s: float) -> T:
        """Run ``query``, which gets its time limit, in the quick lane, then in the slow one. Raises :class:`BusyError`.

        It waits for the slow lane for at most ``timeout_s``.
        """
        try:
            return await self.run(lambda cancelled: query(cancelled, min(timeout_s, _QUICK_S)))
        except QueryTimeoutError:
            if timeout_s <= _QUICK_S:
                raise
        if self._slow.statistics().tasks_waiting < _MAX_WAITING_SLOW:
            with anyio.move_on_after(timeout_s) as waiting:
                async with self._slow:
                    waiting.deadline = math.inf
                    return await _in_thread(lambda cancelled: query(cancelled, timeout_s), self._slow_threads)
        raise BusyError(
            f"the server is busy with other slow queries, and this one takes longer than {_QUICK_S:g} s: write a "
            f"cheaper query, or try again in {timeout_s:g} s"
        )


async def _in_thread(work: Callable[[threading.Event], T], threads: anyio.CapacityLimiter) -> T:
    cancelled = threading.Event()
    try:
        return await anyio.to_thread.run_sync(work, cancelled, abandon_on_cancel=True, limiter=threads)
    except MemoryError as error:  # while opening a connection: not caused by this query
        raise DatabaseError("the server is short of memory, try again in ten seconds") from error
    finally:
        cancelled.set()


class _Functions:
    """The tools' functions. Each runs in a thread and stops when its caller disconnects."""

    def __init__(self, databases: Databases, limits: Limits) -> None:
        self.databases = databases
        self.limits = limits
        self._lanes = _Lanes()

    async def query(self, sql: str, database: str | None = None) -> ToolResult:
        def run(cancelled: threading.Event, timeout_s: float) -> QueryResult:
            path, max_rows = self.databases.path(database), self.limits.max_rows
            return run_query(path, sql, timeout_s=timeout_s, max_rows=max_rows, cancelled=cancelled)

        return _rows_result(await self._lanes.run_query(run, self.limits.timeout_s), self.limits.max_chars)

    async def list_databases(self) -> ToolResult:
        names = await self._lanes.run(lambda _: self.databases.names())
        return _names_result("databases", names, self.limits.max_chars, self.databases.not_served())

    async def list_tables(self, database: str | None = None) -> ToolResult:
        catalog = await self._lanes.run(lambda _: read_catalog(self.databases.path(database)))
        skipped = f"Cannot be used: {with_reasons(catalog.skipped)}" if catalog.skipped else ""
        return _names_result("tables", list(catalog.tables), self.limits.max_chars, skipped)

    async def describe_table(self, table: str, database: str | None = None) -> ToolResult:
        def work(_: threading.Event) -> tuple[str, list[str]]:
            path = self.databases.path(database)
            text, described = describe_table(path, table), read_catalog(path).find(table)
            return text, described.names if described else []

        text, columns = await self._lanes.run(work)
        limit = self.limits.max_chars
        cuts = []
        if (width := _fitting([len(name) + 2 for name in columns], limit)) < len(columns):
            cuts.append(f"{width} of {len(columns)} columns shown.")
        if len(text) > limit:
            shown_part = f"{limit} of {len(text)} characters shown"
            cuts.append(f"{shown_part}: SELECT the columns that you need to see their values.")
        described = {"columns": [_shorten(name, limit) for name in columns[:width]], "definition": text[:limit]}
        return _tool_result(text[:limit], described, cuts)

    async def schema(self, database: str | None = None) -> str:
        return (await self._lanes.run(lambda _: table_info(self.databases.path(database)))).text


def _tool_result(text: str, structured: dict[str, Any], cuts: Sequence[str]) -> ToolResult:
    """Both forms have the notes on cuts, since some clients show the text to their model and some the structure."""
    cut = " ".join(cuts)
    return ToolResult(f"{text}\n{cut}", {**structured, "cut": cut}) if cut else ToolResult(text, structured)


def _rows_result(result: QueryResult, max_chars: int) -> ToolResult:
    """The rows that fit below the names of the columns; of the first row at least a part."""
    columns, cuts = result.columns, list[str]()
    if sum(len(name) + 2 for name in columns) > max_chars:
        limit = max(max_chars // (2 * len(columns)), _MIN_VALUE_CHARS)
        columns = [_shorten(name, limit) for name in columns]
        columns = columns[: _fitting([len(name) + 2 for name in columns], max_chars)]
    left = max_chars - sum(len(name) + 2 for name in columns)
    rows = [tuple(map(_json_value, row[: len(columns)])) for row in result.rows]
    if rows and len(repr(rows[0])) + 2 > left:
        limit = max(left // len(columns), _MIN_VALUE_CHARS)
        if any(isinstance(value, str) and len(value) > limit for value in rows[0]):
            cuts.append("Long values are shortened: ask for a part with substr().")
        first, room = tuple(_shorten(value, limit) for value in rows[0]), max(left, max_chars // 2)
        if len(repr(first)) > room:  # many columns: those that do not fit are left out of all rows
            first = first[: _fitting([len(repr(value)) + 2 for value in first], room)]
            columns = columns[: len(first)]
        rows = [first, *(row[: len(first)] for row in rows[1:])]
    rows = rows[: _fitting([len(repr(row)) + 2 for row in rows], left)]
    if len(columns) < len(result.columns):
        cuts.append(f"{len(columns)} of {len(result.columns)} columns shown: ask for fewer.")
    elif columns != result.columns:
        cuts.append("Long column names are shortened: choose others with AS.")
    if len(rows) < len(result.rows) or result.truncated:
        of = f"more than {len(result.rows)}" if result.truncated else f"{len(result.rows)}"
        cuts.append(f"{len(rows)} of {of} rows shown: ask for less with WHERE, LIMIT, fewer columns or an aggregate.")
    text = render(QueryResult(columns, rows, False, 0.0), max_chars=sys.maxsize, columns=True)
    return _tool_result(text, {"columns": columns, "rows": [list(row) for row in rows]}, cuts)


def _names_result(kind: str, names: list[str], max_chars: int, left_out: str) -> ToolResult:
    fitting = _fitting([len(name) + 2 for name in names], max_chars)
    listed = [_shorten(name, max_chars) for name in names[:fitting]]
    cuts = [f"{fitting} of {len(names)} {kind} shown."] if fitting < len(names) else []
    if cuts and kind == "tables":
        cuts.append("Others: SELECT name FROM sqlite_master WHERE name LIKE '...'")
    if left_out:
        cuts.append(_shorten(left_out, max_chars))
    return _tool_result(", ".join(listed) or f"There are no {kind}.", {kind: listed}, cuts)


def _fitting(sizes: Sequence[int], limit: int) -> int:
    """How many of the first items have a total size within ``limit``, but at least one."""
    return max(sum(total <= limit for total in accumulate(sizes)), min(1, len(sizes)))


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"x'{value[:_BLOB_BYTES].hex()}'" + (f"... {len(value)} bytes" if len(value) > _BLOB_BYTES else "")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _shorten(value: Any, limit: int) -> Any:
    if isinstance(value, str) and len(value) > limit:
        return f"{value[:limit]}... {len(value)} characters"
    return value


class _FixedSchemaTool(Tool):
    """A tool with the given schema. Wrong arguments get a readable error message."""

    work: Callable[..., Awaitable[ToolResult]]
    root: str
    """The database's path on the server, which is removed from error messages."""
    max_chars: int

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
            kind = next(name for errors, name in _KINDS if isinstance(error, errors))
            return ToolResult(_shorten(message, self.max_chars), meta={"error": kind}, is_error=True)


class _ArgumentsError(QueryError):
    def __init__(self, tool: str, wanted: list[str], arguments: Mapping[str, Any]) -> None:
        needs = " and ".join(f"{name!r} (a string)" for name in wanted) or "no arguments"
        got = ", ".join(f"{name!r} ({type(value).__name__})" for name, value in arguments.items()) or "nothing"
        only = " and nothing else" if wanted and set(arguments) - set(wanted) else ""
        super().__init__(f"{tool} needs {needs}{only}; it got {got}")


_KINDS = (
    (DatabaseError, "database"), (QueryTimeoutError, "timeout"), (BusyError, "busy"),
    (_ArgumentsError, "arguments"), (UnknownDatabaseError, "arguments"), (QueryError, "sql"),
)  # fmt: skip
_STRINGS = {"type": "array", "items": {"type": "string"}}
_CUT = {"type": "string", "description": "What was left out"}
_READ_ONLY = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)


def _tools(functions: _Functions) -> list[Tool]:
    where = {"database": "Name of the database"} if functions.databases.is_folder else {}

    def tool(
        work: Callable[..., Awaitable[ToolResult]],
        description: str,
        *,
        name: str = "",
        takes: dict[str, str],
        gives: dict[str, Any],
    ) -> Tool:
        properties = {key: {"type": "string", "description": meaning} for key, meaning in takes.items()}
        return _FixedSchemaTool(
            name=name or work.__name__,
            description=description,
            parameters={"type": "object", "properties": properties, "required": list(takes)},
            output_schema={"type": "object", "properties": {**gives, "cut": _CUT}, "required": list(gives)},
            annotations=_READ_ONLY,
            work=work,
            root=printable(str(functions.databases.root)),
            max_chars=functions.limits.max_chars,
        )

    tools = [
        tool(
            functions.query,
            "Run one read-only SQL query (SQLite) and return its rows.",
            name="query_database_by_sql",
            takes={**where, "sql": "One SELECT statement"},
            gives={"columns": _STRINGS, "rows": {"type": "array", "items": {"type": "array"}}},
        ),
        tool(functions.list_tables, "List the tables and views.", takes=where, gives={"tables": _STRINGS}),
        tool(
            functions.describe_table,
            "Show a table's columns, types, keys and a few values of each column.",
            takes={**where, "table": "Name of the table"},
            gives={"columns": _STRINGS, "definition": {"type": "string"}},
        ),
    ]
    if functions.databases.is_folder:
        tools.insert(0, tool(functions.list_databases, "List the databases.", takes={}, gives={"databases": _STRINGS}))
    return tools


def _resources(functions: _Functions, server: FastMCP) -> None:
    """The whole schema as text, for clients that add it to the context themselves."""
    options = {"description": "The tables with their keys and a few values of each column", "mime_type": "text/plain"}

    async def schema(database: str) -> str:
        try:
            return await functions.schema(database)
        except UnknownDatabaseError as error:
            raise NotFoundError(str(error)) from error
        except QueryError as error:
            raise ResourceError(str(error).replace(printable(str(functions.databases.root)), "...")) from error

    if functions.databases.is_folder:
        server.resource("sqlite:///{database*}/schema", name="schema", **options)(schema)
    else:
        (name,) = functions.databases.names()
        server.resource(f"sqlite:///{quote(name)}/schema", name="schema", **options)(partial(schema, name))
