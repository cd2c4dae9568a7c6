"""An agent of the OpenAI Agents SDK that answers questions about a SQLite database through the MCP SQL server.

    python examples/mcp_openai_agents.py concert_singer.sqlite "How many singers are there?"
    python examples/mcp_openai_agents.py http://127.0.0.1:8000/mcp "How many singers are there?"

The first starts a server of its own, the second uses one that runs: ``python -m tools.mcp_sql --transport http …``. The
model is any that speaks OpenAI's chat completions: OPENAI_BASE_URL, OPENAI_API_KEY and MODEL say which.
"""

from __future__ import annotations

import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner
from agents.mcp import MCPServer, MCPServerStdio, MCPServerStreamableHttp
from openai import AsyncOpenAI

# The SDK gives up on a tool after 5 s, which is when the server stops a query and says so: let it have its say.
PATIENCE_S = 30


def sql_server(database: str) -> MCPServer:
    """The tools for a file, a folder of files, or the server at an address."""
    if database.startswith("http"):
        token = os.environ.get("MCP_SQL_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return MCPServerStreamableHttp(
            {"url": database, "headers": headers}, client_session_timeout_seconds=PATIENCE_S, cache_tools_list=True
        )
    return MCPServerStdio(
        {"command": sys.executable, "args": ["-m", "tools.mcp_sql", "--database", database]},
        client_session_timeout_seconds=PATIENCE_S,
        cache_tools_list=True,
    )


async def ask(database: str, question: str) -> str:
    """The agent's answer."""
    async with sql_server(database) as sql:
        agent = Agent(
            name="analyst",
            instructions="Answer from the database. Look at its tables before you write a query.",
            model=OpenAIChatCompletionsModel(os.environ.get("MODEL", "gpt-4.1-mini"), AsyncOpenAI()),
            mcp_servers=[sql],
        )
        result = await Runner.run(agent, question)
        return str(result.final_output)


if __name__ == "__main__":
    print(asyncio.run(ask(*sys.argv[1:3])))
