"""Train the model behind your own LangGraph graph, as it is: its own model, its own messages, options of its own.

    groundwire run --agent examples/train_your_graph.py:make_graph --agent-option style="Write one SQLite query." --dev
    python examples/train_your_graph.py --ci-fast

A function without a task makes the agent. Its keyword arguments are options (``--agent-option``); the one named
``prompts`` gets those of ``--prompts`` and ``--trainer gepa``, which begins with its default.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

PROMPTS = {"system": "You answer questions about a SQLite database. Write one query in a ```sql block."}


class Question(TypedDict):
    """The graph's input: fields of the task."""

    question: str
    database: str


class State(Question, total=False):
    """The graph's state."""

    answer: str


def make_graph(*, style: str = "Write the query.", prompts: Mapping[str, str] = PROMPTS) -> Any:
    """The compiled graph."""
    model = ChatOpenAI(model="gpt-5-mini", max_retries=0)

    async def answer(state: State) -> dict[str, str]:
        connection = sqlite3.connect(state["database"])
        tables = "\n".join(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL"))
        connection.close()
        message = f"Tables:\n{tables}\nQuestion: {state['question']}\n{style}"
        return {"answer": (await model.ainvoke([("system", prompts["system"]), ("user", message)])).text}

    graph = StateGraph(State, input_schema=Question).add_node("answer", answer)
    return graph.add_edge(START, "answer").add_edge("answer", END).compile()


if __name__ == "__main__":
    import sys

    from groundwire.train.run import app

    app(["--agent", f"{Path(__file__).resolve()}:make_graph", *sys.argv[1:]])
