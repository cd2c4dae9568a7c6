"""The MCP SQL server with other clients: the examples run, with a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastmcp")

from mcp_servers import COMMAND, http_server, make_database
from programs import ROOT, run

from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer

EXAMPLES = ROOT / "examples" / "mcp"
# Only the command line, a third of the Inspector's size; later releases do not start without the rest.
INSPECTOR = "@modelcontextprotocol/inspector-cli@0.15.0"


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return make_database(tmp_path_factory.mktemp("mcp") / "concert.sqlite")


def _calls(number, name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return Reply(tool_calls=[{"id": f"call_{number}", "type": "function", "function": function}])


async def _run_example(name, database, *, run=run, **environment):
    """The example's answer, and the tool messages to its model."""
    script = [
        _calls(1, "list_tables"),
        _calls(2, "query_database_by_sql", sql="SELECT agee FROM singer"),
        _calls(3, "query_database_by_sql", sql="SELECT max(age) FROM singer"),
        "The oldest is 319.",
    ]
    async with ScriptedPolicyServer(replies=script) as model:
        arguments = (str(EXAMPLES / name), str(database), "How old is the oldest singer?")
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": model.base_url,
            "OPENAI_API_KEY": "none",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            **environment,
        }
        done = await asyncio.to_thread(run, *arguments, environment=environment)
        assert done.returncode == 0, done.stderr
        last = model.requests[-1]["messages"]
    return done.stdout.strip(), [json.dumps(message["content"]) for message in last if message["role"] == "tool"]


def _assert_an_agent_repaired_its_query(answer, messages):
    assert answer == "The oldest is 319."
    assert [
        "singer, old" in messages[0],
        "Columns of singer: id, name, age" in messages[1],
        "[(319,)]" in messages[2],
    ] == [True] * 3


async def test_an_openai_agent_uses_the_server_over_stdio(database):
    pytest.importorskip("agents")
    _assert_an_agent_repaired_its_query(*await _run_example("mcp_openai_agents.py", database))


async def test_an_openai_agent_uses_the_server_over_http(database):
    pytest.importorskip("agents")
    with http_server(database) as (url, _):
        _assert_an_agent_repaired_its_query(*await _run_example("mcp_openai_agents.py", url))


@pytest.fixture
def adapters_of_langchain(request, network):
    """A folder with langchain-mcp-adapters and the mcp 1.x that it needs, to be put before the installed packages."""
    if not hasattr(request.config, "cache"):
        pytest.skip("they are kept in the cache of pytest, which is switched off")
    target = Path(request.config.cache.mkdir("langchain-mcp-adapters"))
    if not (target / "langchain_mcp_adapters").exists():
        packages = ["langchain-mcp-adapters==0.3.2", "mcp>=1.24,<2", "httpx-sse"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *packages]
        installed = subprocess.run(command, env=network, check=False, capture_output=True, text=True, timeout=600)
        if installed.returncode:
            pytest.skip(f"langchain-mcp-adapters cannot be installed here: {installed.stderr.strip()[-200:]}")
    return target


# The process has mcp 2 already.
WITH_OTHER_MCP = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "mcp"]:
    del sys.modules[name]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run_with_other_mcp(*arguments, environment):
    return run("-c", WITH_OTHER_MCP, *arguments, environment=environment)


@pytest.mark.usefixtures("forked_python")
async def test_a_langgraph_agent_uses_the_server(database, adapters_of_langchain):
    pytest.importorskip("langchain_openai")
    environment = {"PYTHONPATH": str(adapters_of_langchain), "SERVER_PYTHON": sys.executable}
    answer, messages = await _run_example("mcp_langgraph.py", database, run=_run_with_other_mcp, **environment)
    _assert_an_agent_repaired_its_query(answer, messages)


@pytest.mark.usefixtures("forked_python")
def test_the_mcp_inspector_calls_a_tool(database, network):
    if shutil.which("npx") is None:
        pytest.skip("npx is not installed")
    call = [
        "--method",
        "tools/call",
        "--tool-name",
        "query_database_by_sql",
        "--tool-arg",
        "sql=SELECT max(age) FROM singer",
    ]
    command = ["npx", "--yes", INSPECTOR, "--cli", sys.executable, *COMMAND[1:], "--database", str(database), *call]
    try:
        ended = subprocess.run(command, env=network, check=False, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{INSPECTOR} took too long to install")
    if "npm error" in ended.stderr or "Cannot find module" in ended.stderr:  # npx was stopped in an earlier install
        pytest.skip(f"{INSPECTOR} cannot be installed here: {ended.stderr[-200:]}")
    assert json.loads(ended.stdout)["structuredContent"] == {"columns": ["max(age)"], "rows": [[319]]}, ended.stderr


@pytest.mark.parametrize(("file", "key"), [("mcp_desktop.json", "mcpServers"), ("mcp_vscode.json", "servers")])
async def test_the_entry_of_an_application_starts_the_server(file, key, database, network):
    from mcp import Client, StdioServerParameters

    if (uvx := shutil.which("uvx")) is None:
        pytest.skip("uvx is not installed")
    server = json.loads((EXAMPLES / file).read_text())[key]["sql"]
    assert server["command"] == "uvx"
    places = {"/path/to/database.sqlite": str(database), "/path/to/groundwire[mcp]": f"{ROOT}[mcp]"}
    arguments = [places.get(argument, argument) for argument in server["args"]]
    assert set(places.values()) <= set(arguments)
    async with Client(StdioServerParameters(command=uvx, args=arguments, env=network)) as client:
        result = await client.call_tool("list_tables", {})
    assert result.structured_content == {"tables": ["singer", "old"]}
