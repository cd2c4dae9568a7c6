"""An agent whose tools are those of an MCP server for SQLite (server.py), which it starts and keeps."""

import asyncio
import functools
import json
import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, Runner
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

server = MCPServerStdio(
    name="sqlite",
    params={"command": sys.executable, "args": [str(Path(__file__).with_name("server.py"))]},
    client_session_timeout_seconds=60,  # the default is 5: a busy machine may take longer to start it
    cache_tools_list=True,
    tool_meta_resolver=lambda call: {"database": call.run_context.context["db_path"]},
)
agent = Agent(
    name="Data assistant",
    instructions=(
        "You answer questions about a SQLite database. First describe its tables, then read it with a query. "
        "If a query fails, correct it. When the rows answer the question, reply with the query that found them."
    ),
    mcp_servers=[server],
    model=OpenAIChatCompletionsModel(model="gpt-5-mini", openai_client=AsyncOpenAI()),
)


@functools.cache
def connected() -> asyncio.Task:
    return asyncio.ensure_future(server.connect())


async def answer(task: dict) -> str:
    """The last query that the agent ran for the question."""
    await connected()
    result = await Runner.run(agent, task["question"], context=task)
    calls = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
    queries = [json.loads(call.arguments).get("query", "") for call in calls if call.name == "read_query"]
    return queries[-1] if queries else ""
