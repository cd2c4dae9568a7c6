"""An agent whose tools are those of an MCP server for SQLite (server.py), which it starts and keeps."""

import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

server = MCPServerStdio(
    name="sqlite",
    params={"command": sys.executable, "args": [str(Path(__file__).with_name("server.py"))]},
    client_session_timeout_seconds=300,  # the default is 5: a busy machine may take longer to start it
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
