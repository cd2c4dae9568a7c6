"""The OpenAI Agents SDK agent with its tool on an MCP server, ``python -m tools.mcp_sql``: one for all rollouts.

The policy reads the same words as in :mod:`groundwire.adapters.sql_agents.openai_agents`, so a model trained on one
runs on the other: the database is chosen here and not by the model, and rows come as the server's structured output and
are written as that agent writes them. The Agents SDK's own MCP client is not used, because it sends one request at a
time: one slow query would hold up every other rollout.

A server is started by the first question about its databases: one for each folder of them. One that dies fails the
rollouts that were using it with a :class:`adapters.ToolError`, and the next one starts another.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from agents import Agent
from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport

from groundwire.adapters._types import ToolError
from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.sql_agents.openai_agents import OpenAIAgentsBackend, SQLRun, build_sql_agent
from groundwire.tools.mcp_sql.databases import database_names
from groundwire.tools.sql import DatabaseError, QueryResult, SqlError, render

__all__ = ["McpBackend"]

_MAX_ROWS = 100
_MAX_CHARS = 100_000  # far more than an agent reads: it cuts rows itself
_START_S, _STOP_S, _GRACE_S = 60.0, 5.0, 30.0
# The server ends when its standard input does, so that none is left behind by a trainer that was killed.
_PROGRAM = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from groundwire.tools.mcp_sql.__main__ import main
main()
"""


@dataclass(kw_only=True)
class McpBackend(OpenAIAgentsBackend):
    """The SQL agent over MCP. Its options are those of
    :class:`groundwire.adapters.sql_agents.openai_agents.OpenAIAgentsBackend`.
    """

    def build(self) -> Agent[SQLRun]:
        """The agent, whose tool asks the server."""
        self._servers: dict[Path, asyncio.Task[_Server]] = {}
        return build_sql_agent(
            query=self._query,
            table_info_truncate=self.table_info_truncate,
            example_values=self.example_values,
            show_keys=self.show_keys,
            execution_truncate=self.execution_truncate,
        )

    async def stop(self) -> None:
        """End the servers and close the connections."""
        while self._servers:
            _, starting = self._servers.popitem()
            await asyncio.wait([starting])
            if starting.exception() is None:
                await starting.result().stop()
        await super().stop()

    async def _query(self, run: SQLRun, sql: str) -> str:
        served = _served(Path(run.database))
        if served not in self._servers:
            self._servers[served] = asyncio.create_task(_Server.start(served, query_timeout_s=self.query_timeout_s))
        starting = self._servers[served]
        try:
            server = await asyncio.shield(starting)  # whoever came first may be cancelled while others wait
            result = await server.query(Path(run.database), sql)
        except ToolError:
            if self._servers.get(served) is starting:
                del self._servers[served]
                if starting.exception() is None:
                    await starting.result().stop()
            raise
        return render(result, max_chars=self.execution_truncate)


def _served(database: Path) -> Path:
    """What a server is given: the folder of Spider's ``<folder>/<db>/<db>.sqlite``; of any other layout the one file.

    A server looks through its folder, and what else may lie beside a file that stands alone is not known.
    """
    return database.parent.parent if database.parent.name == database.stem else database


class _Server:
    """One running server and the connection to it."""

    def __init__(self, served: Path, process: subprocess.Popen[str], names: dict[Path, str], timeout_s: float) -> None:
        self._served, self._process, self._names, self._timeout_s = served, process, names, timeout_s
        self._said: deque[str] = deque(maxlen=20)
        self._client: Client[Any]

    @classmethod
    async def start(cls, served: Path, *, query_timeout_s: float) -> _Server:
        """Start the process and connect. Raises :class:`adapters.ToolError` with what the server said."""
        options = {
            "--database": served,
            "--transport": "http",
            "--port": 0,
            "--timeout": query_timeout_s,
            "--max-rows": _MAX_ROWS,
            "--max-chars": _MAX_CHARS,
        }
        arguments = [str(part) for option in options.items() for part in option]
        process = subprocess.Popen(  # noqa: ASYNC220, S603 - it returns at once, and the program is ours
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the trainer, which ends the server when it is done
        )
        found = await asyncio.to_thread(database_names, served)  # none where it is a file
        names = {path: name for name, path in found.items()}
        server = cls(served, process, names, query_timeout_s + _GRACE_S)
        try:
            await server._connect()
        except BaseException:
            await server.stop()
            raise
        return server

    async def _connect(self) -> None:
        assert self._process.stderr is not None
        line = await asyncio.wait_for(asyncio.to_thread(self._process.stderr.readline), _START_S)
        if not line.startswith("serving "):
            raise ToolError(f"the MCP server for {self._served} did not start: {line.strip() or 'it said nothing'}")
        threading.Thread(target=self._said.extend, args=[self._process.stderr], daemon=True).start()
        transport = StreamableHttpTransport(line.split()[-1], httpx_client_factory=_local_client)
        self._client = Client(transport)
        await self._client.__aenter__()

    async def query(self, database: Path, sql: str) -> QueryResult:
        """Run a query. Raises :class:`groundwire.tools.sql.QueryError` as if it were run here, or
        :class:`adapters.ToolError`.
        """
        arguments = {"sql": sql}
        if database != self._served:
            arguments["database"] = self._names.get(database) or database.relative_to(self._served).as_posix()
        try:
            result = await self._client.call_tool_mcp(prompts.QUERY_TOOL["name"], arguments, timeout=self._timeout_s)
        except Exception as error:
            code = self._process.poll()
            what = f"did not answer: {error}" if code is None else f"ended with {code}: {' '.join(self._said)}"
            raise ToolError(f"the MCP server for {self._served} {what}") from error
        if result.is_error:
            message = " ".join(getattr(part, "text", "") for part in result.content)
            raise (DatabaseError if (result.meta or {}).get("error") == "database" else SqlError)(message)
        content: dict[str, Any] = result.structured_content or {}
        rows = [tuple(row) for row in content["rows"]]
        return QueryResult(content["columns"], rows, "cut" in content and len(rows) == _MAX_ROWS, 0.0)

    async def stop(self) -> None:
        """Disconnect and end the process."""
        try:
            if hasattr(self, "_client"):
                await asyncio.wait_for(self._client.close(), _STOP_S)
        except Exception:  # noqa: S110 - the server may be gone already
            pass
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


def _local_client(**options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(**options, trust_env=False)
