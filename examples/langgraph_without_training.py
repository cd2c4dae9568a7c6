"""The SQL agent as a plain LangGraph graph: any chat model, any SQLite file, no training.

    python examples/langgraph_without_training.py concerts.sqlite "How many singers are there?"

Reads OPENAI_API_KEY; for another model set OPENAI_BASE_URL and MODEL.
"""

from __future__ import annotations

import asyncio
import os
import sys

from langchain_openai import ChatOpenAI

from groundwire.adapters.sql_agents.langgraph import build_sql_graph


async def main(database: str, question: str) -> None:
    """Ask one question, and print the agent's steps and its final query."""
    graph = build_sql_graph(ChatOpenAI(model=os.environ.get("MODEL", "gpt-5-mini")), max_turns=3)
    state = await graph.ainvoke({"question": question, "database": database})
    for step in state["steps"]:
        print(f"{step['agent']}: {step['output']}")
    print(f"\n{state['sql']}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
