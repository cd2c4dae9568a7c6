"""Checks an installed wheel, with the base or [mcp], outside of the clone: ``make wheel`` runs it there.

installed_base.py [mcp]
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
from contextlib import closing
from importlib.metadata import distributions
from pathlib import Path

import groundwire
from groundwire.domains.spider.loader import BUNDLED
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.train.config.run_config import RunConfig

TOOLS = {"pip", "setuptools", "pkg_resources"}  # a new environment has them
COMMAND = str(Path(sysconfig.get_path("scripts")) / "groundwire")


async def ask(database: Path) -> None:
    """Start the MCP server and run a query."""
    from fastmcp import Client
    from fastmcp.client.transports import StdioTransport

    server = StdioTransport(COMMAND, ["mcp-sql", "--database", str(database)], keep_alive=False)
    async with Client(server) as client:
        names = {tool.name for tool in await client.list_tools()}
        assert len(names) == 3, names
        answer = await client.call_tool("query_database_by_sql", {"sql": "SELECT name FROM singer"})
        assert "Ann" in str(answer.content)


def main(mcp: bool) -> None:
    """Run the checks and print what was measured."""
    site = Path(groundwire.__file__).parents[1]
    assert site == Path(sysconfig.get_path("purelib")), f"this is not an installed wheel: {site}"
    installed = {each.name.lower() for each in distributions()}
    assert not installed & {"torch", "transformers", "litellm", "agentlightning", "openai", "langgraph"}
    database = Path("singers.sqlite")
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(
            "CREATE TABLE IF NOT EXISTS singer (name text); DELETE FROM singer; INSERT INTO singer VALUES ('Ann');"
        )
    assert execution_match("SELECT name FROM singer", "SELECT name FROM singer", database).score == 1.0
    assert len(list(BUNDLED.glob("database/*/*.sqlite"))) > 100
    assert (site / "groundwire/train/policy/starter/model.safetensors").is_file()
    missing = subprocess.run([COMMAND, "run"], check=False, capture_output=True, text=True)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1), missing.stderr
    assert "pip install 'groundwire[train]'" in missing.stderr
    runner = RunConfig(backend="custom", agent="a:b", n_runners=0, external_store_address="http://127.0.0.1:9")
    name, *options = shlex.split(runner.runner_command())
    command = [str(Path(COMMAND).with_name(name)), *options, "--store-wait-s", "0"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "no store answers at http://127.0.0.1:9" in refused.stderr, refused.stderr
    files = [file for file in site.rglob("*") if file.is_file() and file.relative_to(site).parts[0] not in TOOLS]
    size = sum(file.stat().st_size for file in files)
    print(f"{'base and MCP server' if mcp else 'base'}: {len(installed)} packages, {size / 1e6:.0f} MB")
    if not mcp:
        refused = subprocess.run([COMMAND, "mcp-sql", "--database", "."], check=False, capture_output=True, text=True)
        assert refused.stderr.endswith("pip install 'groundwire[mcp]'\n"), refused.stderr
        return
    asyncio.run(ask(database))
    before = os.times()
    asyncio.run(ask(database))
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"first answer of the MCP server: {seconds:.1f} s of CPU time")


if __name__ == "__main__":
    assert shutil.which(COMMAND), f"{sys.executable} has no {COMMAND}"
    main("mcp" in sys.argv[1:])
