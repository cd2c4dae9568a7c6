"""The LangGraph text-to-SQL agent: it writes a query, executes, checks and rewrites it, and can answer in prose.

The graph is compiled once and contains neither model nor database: both come with each run as LangGraph's runtime
context. So a rollout is cheap, and the same graph works without training::

    graph = build_sql_graph(max_turns=3)
    context = SQLContext(model=ChatOpenAI(model="gpt-5"), database="concerts.sqlite")
    state = await graph.ainvoke({"question": "How many singers are there?"}, context=context)
    state["sql"]

Node names are agent names: ``agent_match="write"`` trains write_query and rewrite_query but not check_query.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime

from groundwire.adapters._types import Answer, Endpoint, Question
from groundwire.adapters.langgraph import LangGraphBackend
from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.sql_agents.named_prompts import Messages
from groundwire.adapters.sql_agents.toolkit import SQLToolkit, check_max_turns
from groundwire.tools.sql.syntax import fenced_sql
from groundwire.tools.types import AgentStep

__all__ = ["LangGraphSQLBackend", "SQLContext", "SQLState", "build_sql_graph"]


class SQLState(TypedDict, total=False):
    """The graph's state: ``question`` is the input, ``sql`` and ``steps`` are the output.

    With ``form`` ``prose`` one more node writes ``answer`` from the last query's rows.
    """

    question: str
    form: str
    sql: str
    result: str
    feedback: str
    answer: str
    turns: int
    steps: Annotated[list[AgentStep], operator.add]


@dataclass(frozen=True, kw_only=True)
class SQLContext:
    """The model and the database of one run. ``headers`` gives a tracing proxy the name of the calling node."""

    model: BaseChatModel
    database: str
    headers: Callable[[str], dict[str, str]] | None = None
    messages: Messages | None = None


@dataclass(frozen=True)
class _Nodes:
    toolkit: SQLToolkit
    own: Messages

    async def write_query(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        step = await self._ask(runtime.context, "write_query", "write", state["question"])
        return {"sql": prompts.extract_sql(step["output"]), "turns": 1, "steps": [step]}

    async def execute_query(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        sql = state["sql"]
        text, ok = await self.toolkit.query_or_error(runtime.context.database, sql)
        return {"result": text, "steps": [AgentStep(agent="execute_query", kind="tool", input=sql, output=text, ok=ok)]}

    async def check_query(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        step = await self._ask(runtime.context, "check_query", "check", *_query(state))
        return {"feedback": step["output"], "steps": [step]}

    async def rewrite_query(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        step = await self._ask(runtime.context, "rewrite_query", "rewrite", *_query(state), state["feedback"])
        sql = fenced_sql(step["output"]) or state["sql"]  # without a block there is no new query
        return {"sql": sql, "turns": state["turns"] + 1, "steps": [step]}

    async def answer_question(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        step = await self._ask(runtime.context, "answer_question", "answer", *_query(state))
        return {"answer": step["output"].strip(), "steps": [step]}

    async def _ask(self, context: SQLContext, node: str, prompt: str, *values: str) -> AgentStep:
        messages = context.messages or self.own
        message = messages.write(prompt, *values)
        system = messages.write("system", self.toolkit.schema(context.database))
        extra: dict[str, Any] = {"extra_headers": context.headers(node)} if context.headers else {}
        reply = await context.model.ainvoke([("system", system), ("user", message)], **extra)
        return AgentStep(agent=node, kind="llm", input=message, output=reply.text, ok=True)


def _query(state: SQLState) -> tuple[str, str, str]:
    return state["question"], state["sql"], state["result"]


def build_sql_graph(
    toolkit: SQLToolkit | None = None, *, max_turns: int = 3, check_last: bool = False, **options: Any
) -> CompiledStateGraph[SQLState, SQLContext, SQLState, SQLState]:
    """The compiled agent. ``options`` are those of :class:`groundwire.adapters.sql_agents.toolkit.SQLToolkit`.

    ``max_turns`` counts queries: the first and each rewrite. The last one allowed is executed but not checked, because
    no check could change the answer any more; ``check_last`` checks it, as the published recipe does. Raises
    ``ValueError`` if ``max_turns`` is below 1.
    """
    check_max_turns(max_turns)
    toolkit = toolkit or SQLToolkit(**options)
    nodes = _Nodes(toolkit, Messages(toolkit.prompts))
    graph = StateGraph(SQLState, context_schema=SQLContext)
    for name in ("write_query", "execute_query", "check_query", "rewrite_query", "answer_question"):
        graph.add_node(name, getattr(nodes, name))

    def end(state: SQLState) -> str:
        return "answer_question" if state.get("form") == "prose" else END

    graph.add_edge(START, "write_query")
    graph.add_edge("write_query", "execute_query")
    graph.add_conditional_edges(
        "execute_query",
        lambda state: end(state) if state["turns"] >= max_turns and not check_last else "check_query",
        ["check_query", "answer_question", END],
    )
    graph.add_conditional_edges(
        "check_query",
        lambda state: (
            end(state) if prompts.is_correct(state["feedback"]) or state["turns"] >= max_turns else "rewrite_query"
        ),
        ["rewrite_query", "answer_question", END],
    )
    graph.add_edge("rewrite_query", "execute_query")
    return graph.compile()


_PROMPTS = ("system", "write", "check", "rewrite")


@dataclass(kw_only=True)
class LangGraphSQLBackend(SQLToolkit, LangGraphBackend):
    """The backend ``langgraph``."""

    max_turns: int = 2
    check_last: bool = False
    request_timeout_s: float = 120.0
    agents = ("write_query", "check_query", "rewrite_query", "answer_question")
    prompt_names = {"sql": _PROMPTS, "prose": (*_PROMPTS, "answer")}

    def __post_init__(self) -> None:
        LangGraphBackend.__init__(
            self,
            build_sql_graph(self, max_turns=self.max_turns, check_last=self.check_last),
            agents=self.agents,
            make_input=lambda question, *_: SQLState(question=question.text, form=question.form, steps=[]),
            make_context=self._context,
            read_answer=_answer,
            recursion_limit=4 * self.max_turns + 4,
            request_timeout_s=self.request_timeout_s,
        )

    def _context(self, question: Question, endpoint: Endpoint, model: BaseChatModel) -> SQLContext:
        messages = self.messages(endpoint.prompts, question.form)
        return SQLContext(model=model, database=question.database, headers=endpoint.agent_headers, messages=messages)


def _answer(question: Question, state: SQLState) -> Answer:
    return Answer(text=state["answer" if question.form == "prose" else "sql"], steps=state["steps"])
