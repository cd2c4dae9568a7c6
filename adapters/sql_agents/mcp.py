"""The OpenAI Agents SDK agent with its tool on an MCP server, ``groundwire mcp-sql``: one connection for all rollouts.

The model reads the same text as with :mod:`groundwire.adapters.sql_agents.openai_agents`, so a model trained with one
works with the other: the database is chosen here and not by the model, and the server's rows are rendered as that agent
renders them. The Agents SDK's own MCP client is not used, because it sends one request at a time: one slow query would
delay all other rollouts. FastMCP's stdio transport is not used either, because it starts the server with asyncio, which
needs a child watcher that the event loop policy of uvloop (set by Ray) does not have.

The first question about a folder of databases starts a server for it. If a server dies, the rollouts that were using it
fail of their tool, and the next one starts another.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport

from groundwire.adapters.agents.app_environment import agent_environment
from groundwire.adapters.agents.making import Kept
from groundwire.adapters.sql_agents.openai_agents import AGENTS, PROMPTS, Query, sql_agent
from groundwire.adapters.sql_agents.prompts import QUERY_TOOL
from groundwire.adapters.sql_agents.toolkit import MAX_ROWS, SQLToolkit, sql_backend
from groundwire.tools.errors import BrokenResourceError
from groundwire.tools.sql import DatabaseError, QueryError, QueryResult, SqlError, render
from groundwire.tools.text import printable

_MAX_CHARS = 100_000  # far more than an agent reads: the toolkit cuts the rows
_START_S, _STOP_S, _GRACE_S = 60.0, 5.0, 30.0
# The server ends when its standard input closes, so a killed trainer leaves no server behind.
_PROGRAM = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from groundwire.tools.mcp_sql.__main__ import app
app()
"""


@asynccontextmanager
async def _queries(toolkit: SQLToolkit) -> AsyncIterator[Query]:
    """A function that runs a query on its database's server, and shows the rows as ``toolkit`` does."""
    servers: dict[Path, Kept[_Server]] = {}

    async def query(database: str, sql: str) -> tuple[str, bool]:
        served = _served_path(Path(database))
        if served not in servers:
            servers[served] = Kept(_server(served, toolkit.query_timeout_s))
        kept = servers[served]
        try:
            result = await (await kept.get()).query(Path(database), sql)
        except DatabaseError:
            raise
        except BrokenResourceError:
            if servers.get(served) is kept:
                await servers.pop(served).close()
            raise
        except QueryError as error:
            return toolkit.error(error), False
        return render(result, max_chars=toolkit.execution_truncate), True

    try:
        yield query
    finally:
        while servers:
            await servers.popitem()[1].close()


backend = sql_backend("mcp", partial(sql_agent, queries=_queries), AGENTS, PROMPTS)
"""The backend ``mcp``."""


def _served_path(database: Path) -> Path:
    """The server's ``--database``: the folder of Spider's ``<folder>/<db>/<db>.sqlite``, else the one file.

    A server searches its folder, which may hold many unrelated files unless the layout is Spider's.
    """
    return database.parent.parent if database.parent.name == database.stem else database


@dataclass(frozen=True, kw_only=True)
class _Server:
    """A running server and the connection to it."""

    served: Path
    process: subprocess.Popen[str]
    client: Client[Any]
    stderr: deque[str]
    timeout_s: float

    async def query(self, database: Path, sql: str) -> QueryResult:
        """Run a query. Raises what it would raise here, or :class:`BrokenResourceError`."""
        arguments = {"sql": sql}
        if database != self.served:
            arguments["database"] = printable(database.relative_to(self.served).as_posix())
        try:
            result = await self.client.call_tool_mcp(QUERY_TOOL["name"], arguments, timeout=self.timeout_s)
        except Exception as error:
            code = self.process.poll()
            what = f"did not answer: {error}" if code is None else f"ended with {code}: {' '.join(self.stderr)}"
            raise BrokenResourceError(f"the MCP server for {self.served} {what}") from error
        if result.is_error:
            message = " ".join(getattr(block, "text", "") for block in result.content)
            raise (DatabaseError if (result.meta or {}).get("error") == "database" else SqlError)(message)
        content: dict[str, Any] = result.structured_content or {}
        rows = [tuple(row) for row in content["rows"]]
        return QueryResult(content["columns"], rows, "cut" in content and len(rows) == MAX_ROWS, 0.0)


@asynccontextmanager
async def _server(served: Path, query_timeout_s: float) -> AsyncIterator[_Server]:
    """A server with a connection, until the end. Raises :class:`BrokenResourceError` with the server's message."""
    options = {"database": served, "transport": "http", "port": 0, "timeout": query_timeout_s}
    options |= {"max-rows": MAX_ROWS, "max-chars": _MAX_CHARS}
    process = subprocess.Popen(  # noqa: ASYNC220, S603 - it returns at once, and the program is ours
        [sys.executable, "-c", _PROGRAM, *(f"--{option}={value}" for option, value in options.items())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=agent_environment(),
        start_new_session=True,  # Ctrl-C goes to the trainer only, which then stops the server
    )
    try:
        assert process.stderr is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stderr.readline), _START_S)
        if not line.startswith("serving "):
            message = line.strip() or "no error message"
            raise BrokenResourceError(f"the MCP server for {served} did not start: {message}")
        stderr = deque[str](maxlen=20)
        threading.Thread(target=stderr.extend, args=[process.stderr], daemon=True).start()
        local_client = partial(httpx2.AsyncClient, trust_env=False)
        client = Client(StreamableHttpTransport(line.split()[-1], httpx_client_factory=local_client))
        await client.__aenter__()
        try:
            timeout_s = query_timeout_s + _GRACE_S
            yield _Server(served=served, process=process, client=client, stderr=stderr, timeout_s=timeout_s)
        finally:
            with suppress(Exception):  # the server may have ended already
                await asyncio.wait_for(client.close(), _STOP_S)
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
