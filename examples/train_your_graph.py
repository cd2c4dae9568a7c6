"""Train the model behind your own LangGraph graph: a backend makes its input and reads the answer from its state.

    python examples/train_your_graph.py --ci-fast

Your own package would register the backend through the entry-point group ``groundwire`` (CONTRIBUTING.md) and
then use ``groundwire run --backend first_try``; here the file registers itself and calls the same program.
"""

from __future__ import annotations

from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph

from groundwire.adapters import Answer, Endpoint, Question
from groundwire.adapters.langgraph import LangGraphBackend
from groundwire.adapters.sql_agents import prompts
from groundwire.tools.plugins import hookimpl, plugin
from groundwire.tools.schema import table_info


class State(TypedDict, total=False):
    """The graph's state."""

    question: Question
    model: Any
    reply: str


async def answer(state: State) -> State:
    """The graph's one node: one call of the model."""
    question = state["question"]
    info = table_info(question.database, example_values=0, show_keys=False)
    messages = [("system", prompts.system_message(info.text)), ("user", prompts.write_message(question.text))]
    return {"reply": (await state["model"].ainvoke(messages)).text}


graph = StateGraph(State).add_node("answer", answer).add_edge(START, "answer").add_edge("answer", END).compile()


def make_input(question: Question, endpoint: Endpoint, model: Any) -> State:
    """``model`` calls ``endpoint``, where every call is traced; the header names the node for ``--agent-match``."""
    return {"question": question, "model": model.bind(extra_headers=endpoint.agent_headers("answer"))}


def read_answer(question: Question, state: State) -> Answer:
    """The query in the model's reply."""
    return Answer(text=prompts.extract_sql(state["reply"]))


def first_try() -> LangGraphBackend:
    """The backend."""
    return LangGraphBackend(graph, agents=("answer",), make_input=make_input, read_answer=read_answer)


class Plugin:
    """The plugin that a package's entry point would name."""

    @hookimpl
    def register_backends(self, register: Any) -> None:
        """Add this file's backend."""
        register("first_try", first_try)


if __name__ == "__main__":
    import sys

    from groundwire.train.run import app

    plugin(Plugin())
    app(["--backend", "first_try", *sys.argv[1:]])
