"""Train a model behind your own LangGraph graph: a backend is a class with one method.

    python examples/train_your_graph.py --ci-fast

A package of your own would register the backend through the entry-point group ``groundwire`` (CONTRIBUTING.md) and
then use ``python -m train.run --backend first_try``; here the file registers itself and calls the same program.
"""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from groundwire.adapters import Answer, Endpoint, Question
from groundwire.adapters.sql_agents import prompts
from groundwire.tools.plugins import hookimpl, plugin
from groundwire.tools.schema import table_info


class State(TypedDict, total=False):
    """What the graph carries."""

    question: Question
    model: Any
    reply: str


async def answer(state: State) -> State:
    """The graph's one node: one call, no second thoughts."""
    question = state["question"]
    info = table_info(question.database, example_values=0, show_keys=False)
    messages = [("system", prompts.system_message(info.text)), ("user", prompts.write_message(question.text))]
    return {"reply": (await state["model"].ainvoke(messages)).text}


class FirstTry:
    """A backend: it is given a question and an endpoint, and answers."""

    agents = ("answer",)

    def __init__(self, **_: Any) -> None:
        graph = StateGraph(State)
        graph.add_node("answer", answer)
        graph.add_edge(START, "answer")
        graph.add_edge("answer", END)
        self.graph = graph.compile()

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Every call to ``endpoint.base_url`` is traced; the header names the node for ``--agent-match``."""
        model = ChatOpenAI(
            model=endpoint.model,
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            default_headers=endpoint.agent_headers("answer"),
            **endpoint.sampling,
        )
        state = await self.graph.ainvoke({"question": question, "model": model})
        return Answer(text=prompts.extract_sql(state["reply"]))


class Plugin:
    """What a package's entry point would name."""

    @hookimpl
    def register_backends(self, register: Any) -> None:
        """Add this file's backend."""
        register("first_try", FirstTry)


if __name__ == "__main__":
    import sys

    from groundwire.train.run import app

    plugin(Plugin())
    app(["--backend", "first_try", *sys.argv[1:]])
