"""The MCP backend is the OpenAI Agents SDK agent with one server for all rollouts; a dead server is a failure."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groundwire import adapters
from groundwire.adapters import Answer, Endpoint, Question, ToolError
from groundwire.adapters.sql_agents import mcp
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.tools.sql.answers import SQL

_ids = itertools.count()


def _call(sql: str) -> Reply:
    function = {"name": "query_database_by_sql", "arguments": json.dumps({"sql": sql})}
    return Reply(tool_calls=[{"id": f"call_{next(_ids)}", "type": "function", "function": function}])


@pytest.fixture
def databases(tmp_path: Path) -> list[str]:
    """Two databases in Spider's layout, and a single file."""
    paths = [tmp_path / "many" / name / f"{name}.sqlite" for name in ("pets", "cars")] + [tmp_path / "one" / "x.sqlite"]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        with sqlite3.connect(path) as conn:
            conn.executescript(
                f"CREATE TABLE t (id int, name text); INSERT INTO t VALUES ({number}, 'a''b'), (9, NULL);"
            )
            conn.executemany("INSERT INTO t VALUES (?, 'many')", [(i,) for i in range(200)])
        conn.close()
    return list(map(str, paths))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The servers, as they are kept."""
    servers: list[Any] = []

    class Noted(mcp.Kept[Any]):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            servers.append(self)

    monkeypatch.setattr(mcp, "Kept", Noted)
    return servers


@asynccontextmanager
async def _stopped(backend: Any) -> AsyncIterator[Any]:
    try:
        yield backend
    finally:
        await backend.stop()


async def _run(backend: Any, replies: Any, database: str) -> tuple[Answer, list[dict[str, Any]]]:
    async with ScriptedPolicyServer(replies=replies) as server:
        endpoint = Endpoint(base_url=server.base_url, model=server.model)
        answer = await backend.run(Question(id="1", text="Which?", database=database, answers=SQL), endpoint)
        return answer, server.requests


async def _until_refused(url: str) -> None:
    """A forked program outlives the process that stands for it by some milliseconds."""
    address = httpx2.URL(url)
    while True:
        try:
            _, writer = await asyncio.open_connection(address.host, address.port)
        except OSError:
            return
        writer.close()
        await asyncio.sleep(0.01)


QUERIES = [
    "SELECT * FROM t LIMIT 2",
    "SELECT id FROM t",
    "SELECT 1.0, 2.5, 'schön', NULL, 9007199254740993",
    "SELECT nope FROM t",
    "DROP TABLE t",
    "SELECT 1; SELECT 2",
    "",
]


@pytest.mark.usefixtures("forked_python")
async def test_the_model_reads_the_same_as_with_the_tool_in_process(databases: list[str]) -> None:
    options: dict[str, Any] = {"max_turns": len(QUERIES), "execution_truncate": 72}
    seen = []
    for backend in (adapters.get("openai-agents")(**options), adapters.get("mcp")(**options)):
        async with _stopped(backend):
            replies = [*map(_call, QUERIES), "```sql\nSELECT 1\n```"]
            for reply, number in zip(replies, itertools.count(), strict=False):
                if isinstance(reply, Reply):
                    reply.tool_calls[0]["id"] = f"call_{number}"  # type: ignore[index]
            answer, requests = await _run(backend, replies, databases[0])
            read = [(request["messages"], request["tools"]) for request in requests]
            seen.append((answer.text, answer.steps, read))
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("forked_python")
async def test_a_folder_of_databases_has_one_server_which_ends_with_the_backend(
    databases: list[str], started: list[Any]
) -> None:
    def reply(body: dict[str, Any]) -> Reply | str:
        last = body["messages"][-1]
        return f"```sql\n{last['content']}\n```" if last["role"] == "tool" else _call("SELECT id FROM t LIMIT 1")

    async with _stopped(adapters.get("mcp")()) as backend, ScriptedPolicyServer(replies=reply) as server:
        endpoint = Endpoint(base_url=server.base_url, model="m")
        answers = await asyncio.gather(
            *(backend.run(Question(id="", text="?", database=path, answers=SQL), endpoint) for path in databases * 4)
        )
        assert [answer.text for answer in answers] == ["[(0,)]", "[(1,)]", "[(2,)]"] * 4
        processes = [(await running.get()).process for running in started]
        assert [process.poll() for process in processes] == [None, None]
    assert None not in [process.poll() for process in processes]


@pytest.mark.usefixtures("forked_python")
async def test_a_slow_query_delays_no_other_rollout(databases: list[str]) -> None:
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    async with _stopped(adapters.get("mcp")(query_timeout_s=1.5)) as backend:
        await _run(backend, [_call("SELECT 1"), "x"], databases[0])
        slow_one = asyncio.create_task(_run(backend, [_call(slow), "x"], databases[0]))
        await asyncio.sleep(0.2)
        await _run(backend, [_call("SELECT 1"), "x"], databases[0])
        assert not slow_one.done()
        _, requests = await slow_one
    assert requests[1]["messages"][-1]["content"] == "Error: the query ran longer than 1.5 s"


@pytest.mark.usefixtures("forked_python")
async def test_a_dead_server_is_a_tool_error_and_the_next_rollout_starts_another(
    databases: list[str], started: list[Any]
) -> None:
    async with _stopped(adapters.get("mcp")()) as backend:
        await _run(backend, [_call("SELECT 1"), "x"], databases[0])
        [running] = started
        server = await running.get()
        os.kill(server.process.pid, signal.SIGKILL)
        await _until_refused(server.client.transport.url)
        with pytest.raises(ToolError, match=r"the MCP server for .*many"):
            await _run(backend, [_call("SELECT 1"), "x"], databases[0])
        _, requests = await _run(backend, [_call("SELECT 1"), "x"], databases[0])
    assert requests[1]["messages"][-1]["content"] == "[(1,)]"


@pytest.mark.usefixtures("forked_python")
async def test_a_broken_database_is_a_tool_error_and_the_server_continues(
    databases: list[str], started: list[Any]
) -> None:
    async with _stopped(adapters.get("mcp")()) as backend:
        await _run(backend, [_call("SELECT 1"), "x"], databases[0])
        [running] = started

        def reply(_: Any) -> Reply:
            Path(databases[0]).write_bytes(b"no database at all" * 100)
            return _call("SELECT * FROM t")

        with pytest.raises(ToolError):
            await _run(backend, reply, databases[0])
        assert started == [running]
