"""An agent of the OpenAI Agents SDK that answers questions about a SQLite database through the MCP SQL server.

    python examples/mcp/mcp_openai_agents.py concert_singer.sqlite "How many singers are there?"
    python examples/mcp/mcp_openai_agents.py http://127.0.0.1:8000/mcp "How many singers are there?"

The first starts a server, the second uses a running one: ``groundwire mcp-sql --transport http …``. OPENAI_BASE_URL,
OPENAI_API_KEY and MODEL select a model with OpenAI's chat completions.
"""

from __future__ import annotations

import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner
from agents.mcp import MCPServer, MCPServerStdio, MCPServerStreamableHttp
from openai import AsyncOpenAI

# The SDK's default of 5 s is also the server's limit of a query, so the model would not see the server's message.
TIMEOUT_S = 30


def sql_server(database: str) -> MCPServer:
    """The server for a file or a folder of files, or at an address."""
    if database.startswith("http"):
        token = os.environ.get("MCP_SQL_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return MCPServerStreamableHttp(
            {"url": database, "headers": headers}, client_session_timeout_seconds=TIMEOUT_S, cache_tools_list=True
        )
    return MCPServerStdio(
        {"command": sys.executable, "args": ["-m", "groundwire.tools.mcp_sql", "--database", database]},
        client_session_timeout_seconds=TIMEOUT_S,
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
