"""A LangGraph agent that answers questions about a SQLite database through the MCP SQL server.

    python examples/mcp/mcp_langgraph.py concert_singer.sqlite "How many singers are there?"

langchain-mcp-adapters 0.3 needs mcp < 2, and the server needs mcp 2. So install the agent in a separate environment
(``pip install langchain-mcp-adapters langgraph langchain-openai``), and set SERVER_PYTHON to the Python that has
groundwire. OPENAI_BASE_URL, OPENAI_API_KEY and MODEL select a model with OpenAI's chat completions.
"""

from __future__ import annotations

import asyncio
import os
import sys

from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import load_mcp_tools
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


async def ask(database: str, question: str) -> str:
    """The agent's answer."""
    sql = {
        "transport": "stdio",
        "command": os.environ.get("SERVER_PYTHON", sys.executable),
        "args": ["-m", "groundwire.tools.mcp_sql", "--database", database],
    }
    async with MultiServerMCPClient({"sql": sql}).session("sql") as session:
        tools = await load_mcp_tools(session)
        model = ChatOpenAI(model=os.environ.get("MODEL", "gpt-4.1-mini")).bind_tools(tools)

        async def think(state: MessagesState) -> dict[str, list]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("think", think)
        # An SQL error is a message to the model, which may try again.
        graph.add_node("tools", ToolNode(tools, handle_tool_errors=True))
        graph.add_edge(START, "think")
        graph.add_conditional_edges("think", tools_condition)
        graph.add_edge("tools", "think")
        state = await graph.compile().ainvoke({"messages": [("user", question)]})
        return str(state["messages"][-1].content)


if __name__ == "__main__":
    print(asyncio.run(ask(*sys.argv[1:3])))
