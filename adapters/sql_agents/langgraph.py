"""The LangGraph text-to-SQL agent: it writes a query, executes, checks and rewrites it, and can answer in prose.

It is an ordinary graph over an ordinary chat model, and runs without training as well::

    graph = build_sql_graph(ChatOpenAI(model="gpt-5"), max_turns=3)
    state = await graph.ainvoke({"question": "How many singers are there?", "database": "concerts.sqlite"})
    state["sql"]

Node names are agent names: ``agent_match="write"`` trains write_query and rewrite_query but not check_query.
"""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.pregel import Pregel
from openai import DefaultAioHttpClient

from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.sql_agents.toolkit import SQLGraphOptions, sql_backend
from groundwire.tools.sql.answers import fenced_sql
from groundwire.tools.types import AgentStep

AGENTS = ("write_query", "check_query", "rewrite_query", "answer_question")
"""The nodes that ask the model."""
_PROMPTS = ("system", "write", "check", "rewrite")
PROMPTS = {"sql": _PROMPTS, "prose": (*_PROMPTS, "answer")}
"""The names of the prompts for each form of answers; the first two make the first request."""


class SQLQuestion(TypedDict):
    """The graph's input."""

    question: str
    database: str


class SQLState(SQLQuestion, total=False):
    """The graph's state."""

    sql: str
    result: str
    feedback: str
    answer: str
    turns: int
    steps: Annotated[list[AgentStep], operator.add]


class SQLAnswer(TypedDict, total=False):
    """The graph's output. With answers in prose one more node writes ``answer`` from the last query's rows."""

    sql: str
    answer: str
    steps: list[AgentStep]


@dataclass(frozen=True)
class _Nodes:
    model: BaseChatModel
    toolkit: SQLGraphOptions
    texts: Mapping[str, str]

    async def write_query(self, state: SQLState) -> dict[str, Any]:
        step = await self._ask(state, "write_query", "write", state["question"])
        return {"sql": prompts.extract_sql(step["output"]), "turns": 1, "steps": [step]}

    async def execute_query(self, state: SQLState) -> dict[str, Any]:
        sql = state["sql"]
        text, ok = await self.toolkit.query(state["database"], sql)
        return {"result": text, "steps": [AgentStep(agent="execute_query", kind="tool", input=sql, output=text, ok=ok)]}

    async def check_query(self, state: SQLState) -> dict[str, Any]:
        step = await self._ask(state, "check_query", "check", *_query(state))
        return {"feedback": step["output"], "steps": [step]}

    async def rewrite_query(self, state: SQLState) -> dict[str, Any]:
        step = await self._ask(state, "rewrite_query", "rewrite", *_query(state), state["feedback"])
        sql = fenced_sql(step["output"]) or state["sql"]  # without a block there is no new query
        return {"sql": sql, "turns": state["turns"] + 1, "steps": [step]}

    async def answer_question(self, state: SQLState) -> dict[str, Any]:
        step = await self._ask(state, "answer_question", "answer", *_query(state))
        return {"answer": step["output"].strip(), "steps": [step]}

    async def _ask(self, state: SQLState, node: str, prompt: str, *values: str) -> AgentStep:
        message = prompts.write(prompt, *values, own=self.texts)
        system = prompts.write("system", self.toolkit.schema(state["database"]), own=self.texts)
        reply = await self.model.ainvoke([("system", system), ("user", message)])
        return AgentStep(agent=node, kind="llm", input=message, output=reply.text, ok=True)


def _query(state: SQLState) -> tuple[str, str, str]:
    return state["question"], state["sql"], state["result"]


def build_sql_graph(
    model: BaseChatModel,
    options: SQLGraphOptions | None = None,
    *,
    form: str = "sql",
    texts: Mapping[str, str] | None = None,
    **fields: Any,
) -> Pregel[Any, Any, Any, Any]:
    """The compiled agent with ``options``, or with the ``fields`` of :class:`SQLGraphOptions`, such as ``max_turns=3``.

    ``form`` is ``sql`` or ``prose``; ``texts`` replace prompts by their names.
    """
    options = options or SQLGraphOptions(**fields)
    nodes = _Nodes(model, options, prompts.texts(options.prompt_profile, PROMPTS[form], texts))
    graph = StateGraph(SQLState, input_schema=SQLQuestion, output_schema=SQLAnswer)
    for name in ("execute_query", *AGENTS):
        graph.add_node(name, getattr(nodes, name))
    end = "answer_question" if form == "prose" else END

    def after_execution(state: SQLState) -> str:
        return end if state["turns"] >= options.max_turns and not options.check_last else "check_query"

    def after_check(state: SQLState) -> str:
        done = prompts.is_correct(state["feedback"]) or state["turns"] >= options.max_turns
        return end if done else "rewrite_query"

    graph.add_edge(START, "write_query")
    graph.add_edge("write_query", "execute_query")
    graph.add_conditional_edges("execute_query", after_execution, ["check_query", "answer_question", END])
    graph.add_conditional_edges("check_query", after_check, ["rewrite_query", "answer_question", END])
    graph.add_edge("rewrite_query", "execute_query")
    return graph.compile().with_config(recursion_limit=4 * options.max_turns + 4)


@asynccontextmanager
async def sql_graph(
    options: SQLGraphOptions, *, form: str, prompts: Mapping[str, str] | None = None
) -> AsyncIterator[Pregel[Any, Any, Any, Any]]:
    """The agent of ``--backend langgraph``. Its connections are closed at the end."""
    async with DefaultAioHttpClient() as connections:
        # A call that the client repeats by itself would be a sample without a reward.
        model = ChatOpenAI(model="gpt-5-mini", http_async_client=connections, max_retries=0, timeout=120)
        yield build_sql_graph(model, options, form=form, texts=prompts)


backend = sql_backend("langgraph", sql_graph, AGENTS, PROMPTS, SQLGraphOptions)
"""The backend ``langgraph``."""
