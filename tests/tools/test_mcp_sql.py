"""The MCP SQL server: its tools, its clients, access control, and errors at the start."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastmcp")

import httpx2
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_servers import COMMAND, SLOW, http_server, make_database
from programs import run

from groundwire.tools.mcp_sql import server as mcp_server
from groundwire.tools.mcp_sql.databases import Databases, UnknownDatabaseError, database_names
from groundwire.tools.mcp_sql.server import Limits, sql_server
from groundwire.tools.terminal import version


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return make_database(tmp_path_factory.mktemp("mcp") / "concert.sqlite")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("spider")
    for name in ("concert", "pets"):
        make_database(root / "database" / name / f"{name}.sqlite", table=f"{name}_table")
    return root / "database"


@pytest.fixture(scope="module")
def url(database):
    with http_server(database, "--timeout", "60") as (url, _):
        yield url


@contextlib.asynccontextmanager
async def connected(path, **limits):
    from fastmcp import Client as InProcess

    async with InProcess(sql_server(Databases(path), limits=Limits(**limits))) as client:
        yield client


async def call(client, name, **arguments):
    result = await client.call_tool_mcp(name, arguments)
    return result, result.content[0].text


async def query(path, sql, **limits):
    async with connected(path, **limits) as client:
        return await call(client, "query_database_by_sql", sql=sql)


# The tools' schemas


async def _seen(path):
    async with connected(path) as client:
        tools = [tool.model_dump(by_alias=True, exclude_none=True) for tool in await client.list_tools()]
    return json.dumps(
        [{key: tool[key] for key in ("name", "description", "inputSchema", "outputSchema")} for tool in tools]
    )


def _tokens(text):
    try:
        import tiktoken

        return len(tiktoken.get_encoding("cl100k_base").encode(text))
    except Exception:  # not installed, or its vocabulary cannot be downloaded: words and marks are more than tokens
        return len(re.findall(r"\w+|[^\w\s]", text))


async def test_the_whole_schema_of_the_tools_is_under_a_thousand_tokens(database, folder):
    assert 100 < _tokens(await _seen(database)) < 1000
    assert 100 < _tokens(await _seen(folder)) < 1000


async def test_the_tools_take_a_database_only_for_a_folder(database, folder):
    assert '"database":' not in await _seen(database)
    async with connected(folder) as client:
        asked = {tool.name: tool.input_schema["required"] for tool in await client.list_tools()}
    assert asked == {
        "list_databases": [],
        "query_database_by_sql": ["database", "sql"],
        "list_tables": ["database"],
        "describe_table": ["database", "table"],
    }


async def test_the_server_reports_the_version_of_this_project(database):
    async with connected(database) as client:
        server = client.server_info
    assert (server.name, server.version) == ("sql", version())


async def test_every_tool_is_annotated_as_read_only(database):
    async with connected(database) as client:
        hints = [tool.annotations for tool in await client.list_tools()]
    assert len(hints) == 3
    assert all(hint.read_only_hint and not hint.destructive_hint and not hint.open_world_hint for hint in hints)


# The tools' answers


async def test_rows_come_as_text_and_as_data(database):
    result, text = await query(database, "SELECT id, name FROM singer LIMIT 2")
    assert text == "(id, name)\n[(0, 'name 0'), (1, 'name 1')]"
    assert result.structured_content == {"columns": ["id", "name"], "rows": [[0, "name 0"], [1, "name 1"]]}


async def test_a_long_result_ends_with_a_note_on_the_cut(database):
    result, text = await query(database, "SELECT * FROM singer", max_chars=500, max_rows=100)
    shown = len(result.structured_content["rows"])
    note = f"{shown} of more than 100 rows shown: ask for less with WHERE, LIMIT, fewer columns or an aggregate."
    assert 5 < shown < 100
    assert text.endswith(note)
    assert result.structured_content["cut"] == note
    assert len(text) < 500 + len(note) + 2


async def test_a_long_value_is_shortened_with_a_note(database):
    result, text = await query(database, "SELECT printf('%.5000c', 'x'), 1", max_chars=200)
    assert "5000 characters" in text
    assert "substr()" in text
    assert len(text) < 400
    assert result.structured_content["rows"][0][1] == 1


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("query_database_by_sql", {"sql": f"SELECT 1 AS {LONG}"}),
        ("query_database_by_sql", {"sql": f"SELECT {LONG} FROM wide"}),
        ("query_database_by_sql", {"sql": "SELECT " + ", ".join(f"'{'y' * 90}' AS a{i}" for i in range(1500))}),
        ("query_database_by_sql", {"sql": "SELECT 1", LONG: 2}),
        ("query_database_by_sql", {f"a{i}": 1 for i in range(10_000)}),
        ("describe_table", {"table": LONG}),
        ("describe_table", {"table": "wide"}),
        ("describe_table", {"table": "n" * 5000}),
        ("list_tables", {}),
        (LONG, {}),
    ],
    ids=range(10),
)
async def test_names_of_any_length_are_cut_to_max_chars(tmp_path, tool, arguments):
    path = tmp_path / "wide.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as conn:
        conn.execute(f"CREATE TABLE {'n' * 5000} (a INT)")
        conn.execute(f"CREATE TABLE wide ({', '.join(f'column_{i}' for i in range(1500))})")
    async with connected(path, max_chars=500) as client:
        result, text = await call(client, tool, **arguments)
    assert len(text) < 700
    assert len(json.dumps(result.structured_content)) < 1500


async def test_a_resource_s_name_of_any_length_is_cut_to_max_chars(database, folder):
    for path, uri in (
        (database, f"sqlite:///{LONG}/schema"),
        (folder, f"sqlite:///{LONG}/schema"),
        (folder, f"sqlite:///{LONG}"),
    ):
        async with connected(path, max_chars=500) as client:
            with pytest.raises(Exception, match="xxxxx") as caught:
                await client.read_resource(uri)
        assert len(str(caught.value)) < 700


async def test_values_without_a_json_type_are_text(database):
    result, _ = await query(database, "SELECT x'00ff', 9e999, zeroblob(100), NULL")
    assert result.structured_content["rows"] == [["x'00ff'", "inf", f"x'{'00' * 32}'... 100 bytes", None]]


async def test_tables_and_views_are_listed_and_described(database):
    async with connected(database) as client:
        listed, text = await call(client, "list_tables")
        described, definition = await call(client, "describe_table", table="SINGER")
        _, view = await call(client, "describe_table", table="old")
    assert (text, listed.structured_content) == ("singer, old", {"tables": ["singer", "old"]})
    assert definition.startswith(
        "CREATE TABLE singer ( id int , name text , age int , primary key ( id ) )\n-- id : 0 , 1"
    )
    assert described.structured_content == {"columns": ["id", "name", "age"], "definition": definition}
    assert view == "CREATE VIEW old ( name text )"


async def test_the_schema_is_a_resource(database, folder):
    async with connected(database) as client:
        (resource,) = await client.list_resources()
        (content,) = await client.read_resource(resource.uri)
    assert str(resource.uri) == "sqlite:///concert/schema"
    assert content.text.startswith("CREATE TABLE singer (")
    async with connected(folder) as client:
        (content,) = await client.read_resource("sqlite:///pets/schema")
    assert content.text.startswith("CREATE TABLE pets_table (")


@pytest.mark.parametrize(
    ("sql", "kind", "message"),
    [
        ("SELECT agee FROM singer", "sql", "Columns of singer: id, name, age"),
        ("SELECT * FROM nobody", "sql", "Tables: singer, old"),
        ("DROP TABLE singer", "sql", "not allowed"),
        ("", "sql", "write one SELECT"),
        ("SELECT '" + "x" * 1_000_000 + "'", "sql", "too long"),
        (SLOW, "timeout", "longer than 0.1 s"),
    ],
)
async def test_an_error_in_a_query_is_a_tool_error_with_a_helpful_message(database, sql, kind, message):
    result, text = await query(database, sql, timeout_s=0.1)
    assert result.is_error
    assert result.meta["error"] == kind
    assert message in text


async def test_only_the_first_of_ten_million_rows_are_read(database):
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000000) SELECT i FROM n"
    result, text = await query(database, rows)
    assert not result.is_error
    assert result.structured_content["rows"][:2] == [[1], [2]]
    assert text.endswith("of more than 1000 rows shown: ask for less with WHERE, LIMIT, fewer columns or an aggregate.")


async def test_wrong_arguments_are_named(database):
    async with connected(database) as client:
        result, text = await call(client, "query_database_by_sql", query="SELECT 1", limit=3)
    assert result.is_error
    assert result.meta["error"] == "arguments"
    assert text == (
        "query_database_by_sql needs 'sql' (a string) and nothing else; it got 'query' (str), 'limit' (int)"
    )


async def test_a_broken_database_has_its_own_kind_of_error(tmp_path):
    path = make_database(tmp_path / "gone.sqlite")
    async with connected(path) as client:
        path.unlink()
        for name, arguments in (("query_database_by_sql", {"sql": "SELECT 1"}), ("list_tables", {})):
            result, text = await call(client, name, **arguments)
            assert result.is_error
            assert result.meta["error"] == "database"
            assert str(tmp_path) not in text


# Names of databases


async def test_a_folder_s_databases_are_found_by_name(folder):
    async with connected(folder) as client:
        _, names = await call(client, "list_databases")
        result, _ = await call(client, "query_database_by_sql", database="pets", sql="SELECT count(*) FROM pets_table")
        unknown, text = await call(client, "list_tables", database="../pets")
    assert names == "concert, pets"
    assert result.structured_content["rows"] == [[300]]
    assert unknown.is_error
    assert unknown.meta["error"] == "arguments"
    assert text == "no database '../pets'. Databases: pets"


def test_a_name_never_means_another_file_later(tmp_path):
    first = make_database(tmp_path / "a" / "a.sqlite")
    (tmp_path / "notes.txt").write_text("no database")
    databases = Databases(tmp_path)
    assert databases.path("a") == databases.path("a/a.sqlite") == first
    second = make_database(tmp_path / "a.db")
    assert database_names(tmp_path) == ({"a.db": second, "a/a.sqlite": first}, {})
    assert databases.names() == ["a.db", "a/a.sqlite"]
    assert databases.path("a/a.sqlite") == first
    with pytest.raises(UnknownDatabaseError, match=r"a\.db, a/a\.sqlite"):
        databases.path("a")


def test_a_new_database_is_served_at_once(tmp_path):
    make_database(tmp_path / "old.db")
    databases = Databases(tmp_path)
    new = make_database(tmp_path / "deep" / "new.sqlite")
    assert databases.path("deep/new") == new


def test_a_link_that_leads_out_of_the_folder_is_no_database(tmp_path):
    outside, folder = make_database(tmp_path / "outside" / "private.sqlite"), tmp_path / "folder"
    inside = make_database(folder / "deep" / "inside.sqlite")
    (folder / "link.sqlite").symlink_to(outside)
    (folder / "alias.sqlite").symlink_to(inside)
    (folder / "linked_folder").symlink_to(outside.parent)
    os.mkfifo(folder / "pipe.sqlite")
    databases = Databases(folder)
    assert databases.names() == ["alias", "deep/inside"]
    for name in ("link", "link.sqlite", "linked_folder/private"):
        with pytest.raises(UnknownDatabaseError):
            databases.path(name)
    inside.unlink()
    inside.symlink_to(outside)  # after its name was looked up
    for name in ("deep/inside", "alias"):
        with pytest.raises(UnknownDatabaseError):
            databases.path(name)


# Clients


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_python_sdk_is_served_over_stdio(database, mode):
    command = StdioServerParameters(command=sys.executable, args=[*COMMAND[1:], "--database", str(database)])
    async with Client(command, mode=mode) as client:
        result = await client.call_tool("query_database_by_sql", {"sql": "SELECT count(*) FROM singer"})
    assert result.structured_content["rows"] == [[300]]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_query_stops_when_its_client_cancels_it(database, mode):
    """The server's processor time stops increasing long before the query's deadline."""
    with http_server(database, "--timeout", "300") as (url, process):
        async with Client(url, mode=mode) as client:
            before = _cpu_ticks(process.pid)
            slow = asyncio.create_task(client.call_tool("query_database_by_sql", {"sql": SLOW}))
            await _until(lambda: _cpu_ticks(process.pid) > before + 20)
            slow.cancel()
            await _until(lambda: _cpu_ticks_during(0.3, process.pid) <= 2)
            result = await client.call_tool("query_database_by_sql", {"sql": "SELECT 1"})
    assert not result.is_error


async def _until(happens):
    for _ in range(10_000):
        if await asyncio.to_thread(happens):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the condition did not become true")


def _cpu_ticks(pid):
    """The processor time of a process so far, in hundredths of a second."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def _cpu_ticks_during(seconds, pid):
    before = _cpu_ticks(pid)
    time.sleep(seconds)
    return _cpu_ticks(pid) - before


async def test_slow_queries_do_not_delay_the_other_of_many_clients(url):
    """The others are answered while the slow queries run, which do not end before they are cancelled."""
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx2.AsyncClient(timeout=600))  # one each would take the longest time
        transports = [streamable_http_client(url, http_client=http) for _ in range(32)]
        clients = [await stack.enter_async_context(Client(transport)) for transport in transports]
        slow = [asyncio.create_task(client.call_tool("query_database_by_sql", {"sql": SLOW})) for client in clients[:8]]
        await asyncio.sleep(0.2)
        quick = [
            client.call_tool("query_database_by_sql", {"sql": "SELECT max(id) FROM singer"}) for client in clients[8:]
        ]
        answers = await asyncio.gather(*quick)
        still_running = [not task.done() for task in slow]
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
    assert [answer.structured_content["rows"] for answer in answers] == [[[299]]] * 24
    assert all(still_running)


async def test_a_flood_of_slow_queries_delays_nobody_and_most_are_refused_as_busy(database):
    """A quick query is answered while slow ones run, which do not end before they are cancelled.

    The flood is twice as many as the server runs and lets wait.
    """
    flood_size = 2 * (mcp_server._SLOW_THREADS + mcp_server._MAX_WAITING_SLOW)
    with http_server(database, "--timeout", "60") as (url, _):
        many = httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None))
        async with many, Client(streamable_http_client(url, http_client=many)) as flood, Client(url) as other:
            query = functools.partial(flood.call_tool, "query_database_by_sql", {"sql": SLOW})
            slow = [asyncio.create_task(query()) for _ in range(flood_size)]
            ended, _ = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
            quick = await other.call_tool("query_database_by_sql", {"sql": "SELECT max(id) FROM singer"})
            still_running = [task for task in slow if not task.done()]
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
    refused = ended.pop().result()
    assert refused.meta, refused
    assert refused.meta["error"] == "busy"
    assert refused.content[0].text == (
        "the server is busy with other slow queries, and this one takes longer than 0.25 s: write a cheaper query, or "
        "try again in 60 s"
    )
    assert quick.structured_content["rows"] == [[299]]
    assert still_running


# Access control and start


def _post(url, **headers):
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_dns_rebinding_by_a_web_page_is_refused(url):
    assert _post(url, Host="evil.example") == 403
    assert _post(url, Origin="http://evil.example") == 403
    assert _post(url, Origin="http://127.0.0.1:1") == 403  # a page of another server of this machine
    assert _post(url, **{"Content-Type": "text/plain"}) == 415


async def test_a_client_that_leaves_is_not_reported(database):
    with http_server(database) as (url, server):
        port = int(url.split(":")[2].partition("/")[0])
        head = "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}Accept: application/json, text/event-stream\r\n\r\n{{".encode())
            await asyncio.sleep(0.3)
            writer.transport.abort()
        async with Client(url) as client:
            assert await client.list_tools()
        assert server.stderr_so_far().count("\n") == 1, server.stderr_so_far()


@pytest.mark.parametrize("given", ["option", "file", "variable"])
async def test_clients_without_the_token_are_refused(database, given, tmp_path, monkeypatch):
    secret = "a-token-of-this-server"
    options = {"option": ("--token", secret), "file": ("--token-file", str(tmp_path / "token")), "variable": ()}[given]
    (tmp_path / "token").write_text(secret)
    if given == "variable":
        monkeypatch.setenv("MCP_SQL_TOKEN", secret)
    with http_server(database, *options) as (url, process):
        assert _post(url) == _post(url, Authorization="Bearer wrong") == 401
        http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {secret}"})
        async with http, Client(streamable_http_client(url, http_client=http)) as client:
            assert len((await client.list_tools()).tools) == 3
        warned = "all users of this machine see --token in its process list" in process.stderr_so_far()
        assert warned == (given == "option")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--database", "nowhere.sqlite"], "no database at nowhere.sqlite"),
        (["--database", __file__], "is no SQLite database"),
        (["--database", str(Path(__file__).parent)], "no SQLite database in"),
        (["--database", "{database}", "--transport", "http", "--host", "0.0.0.0"], "needs a token"),
        (
            ["--database", "{database}", "--transport", "http", "--port", "{taken}"],
            "is in use: stop the server there",
        ),
        (["--database", "{database}", "--port", "70000"], "Invalid value for '--port'"),
        (["--database", "{database}", "--max-rows", "0"], "Invalid value for '--max-rows'"),
        (["--database", "{database}", "--timeout", "nan"], "'nan' is not a positive number"),
    ],
)
def test_a_start_that_fails_has_a_one_line_error(database, options, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = [option.format(database=database, taken=port) for option in options]
        ended = run(*COMMAND[1:], *options, timeout=600)
    assert ended.returncode == 2
    assert message in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("transport", ["http", "stdio"])
def test_ctrl_c_ends_the_server_without_a_traceback(database, transport):
    if transport == "http":
        with http_server(database) as (_, process):
            process.send_signal(signal.SIGINT)
            ended = process.wait(600)
            assert ended.returncode == 0
            [_, errors] = ended.stderr.split("\n", 1)
    else:
        process = subprocess.Popen(
            [sys.executable, *COMMAND[1:], "--database", str(database)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            hello = {"jsonrpc": "2.0", "id": 1, "method": "server/discover", "params": {}}
            process.stdin.write(json.dumps(hello) + "\n")
            process.stdin.flush()
            assert process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(600) == -signal.SIGINT
            errors = process.stderr.read()
    assert errors == ""


def test_help_and_the_sql_tools_do_not_import_fastmcp():
    code = (
        "import sys, groundwire.tools.sql, groundwire.tools.mcp_sql.__main__;"
        "print([name for name in sys.modules if 'mcp' in name])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        == "['groundwire.tools.mcp_sql', 'groundwire.tools.mcp_sql.databases', 'groundwire.tools.mcp_sql.__main__']\n"
    )


async def test_the_first_answers_do_not_import_fastmcp_s_store_of_sessions(database, monkeypatch):
    async with connected(database) as client:
        monkeypatch.setitem(sys.modules, "key_value.aio.stores.memory", None)
        assert len(await client.list_tools()) == 3
        assert (await call(client, "list_tables"))[1] == "singer, old"


async def test_connections_that_send_no_request_are_closed(monkeypatch):

    from groundwire.tools.mcp_sql import __main__ as command

    monkeypatch.setattr(command, "_FIRST_REQUEST_S", 0.3)

    async def slow(scope, receive, send):
        await asyncio.sleep(1)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(slow, port=0, http=command._closing_protocol(), lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    head = b"GET / HTTP/1.1\r\nHost: a\r\n"
    for sent, answer in ((b"", b""), (head, b""), (head + b"\r\n", b"HTTP/1.1 204")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert (await asyncio.wait_for(reader.read(12), 600)) == answer
        writer.close()
    server.should_exit = True
    await serving
