"""The LangGraph text-to-SQL agent: write, execute, check, rewrite, and answer where sentences are asked for.

The graph is compiled once and knows neither model nor database: both come with each run as LangGraph's runtime context.
That keeps a rollout cheap, and gives the same graph to anybody who wants it without training::

    graph = build_sql_graph(max_turns=3)
    context = SQLContext(model=ChatOpenAI(model="gpt-5"), database="concerts.sqlite")
    state = await graph.ainvoke({"question": "How many singers are there?"}, context=context)
    state["sql"]

Node names are agent names: ``agent_match="write"`` trains write_query and rewrite_query and leaves check_query alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime

from groundwire.adapters._openai_client import Clients, typed_failures
from groundwire.adapters._types import Answer, Endpoint, Question
from groundwire.adapters.sql_agents import prompts
from groundwire.tools.schema import table_info
from groundwire.tools.sql import DatabaseError, QueryError, render, run_query
from groundwire.tools.types import AgentStep, AnswerForm

__all__ = ["LangGraphBackend", "SQLContext", "SQLState", "build_sql_graph"]


def _append(old: list[AgentStep], new: list[AgentStep]) -> list[AgentStep]:
    return old + new


class SQLState(TypedDict, total=False):
    """What the graph carries: give it ``question``, read ``sql`` (and ``steps``) at the end.

    With ``form`` ``prose`` one more node says in ``answer`` what the last query's rows say.
    """

    question: str
    form: AnswerForm
    sql: str
    result: str
    feedback: str
    answer: str
    turns: int
    steps: Annotated[list[AgentStep], _append]


@dataclass(frozen=True, kw_only=True)
class SQLContext:
    """What one run works with. ``headers`` names the calling node to a tracing proxy; leave it out without one."""

    model: BaseChatModel
    database: str
    headers: Callable[[str], dict[str, str]] | None = None


@dataclass(frozen=True, kw_only=True)
class _Nodes:
    """The graph's nodes over the options that they share."""

    table_info_truncate: int | None
    example_values: int
    show_keys: bool
    execution_truncate: int
    query_timeout_s: float

    async def write_query(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        question = state["question"]
        step = await self._ask(runtime.context, "write_query", prompts.write_message(question))
        return {"sql": prompts.extract_sql(step["output"]), "turns": 1, "steps": [step]}

    async def execute_query(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        sql, ok = state["sql"], True
        try:
            # In a thread: a query may take seconds, and every other rollout runs on this loop.
            result = await asyncio.to_thread(
                run_query, runtime.context.database, sql, timeout_s=self.query_timeout_s, max_rows=100
            )
            text = render(result, max_chars=self.execution_truncate)
        except DatabaseError:
            raise
        except QueryError as error:
            text, ok = f"Error: {error}"[: self.execution_truncate], False
        return {"result": text, "steps": [AgentStep(agent="execute_query", kind="tool", input=sql, output=text, ok=ok)]}

    async def check_query(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        message = prompts.check_message(state["question"], state["sql"], state["result"])
        step = await self._ask(runtime.context, "check_query", message)
        return {"feedback": step["output"], "steps": [step]}

    async def rewrite_query(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        message = prompts.rewrite_message(state["question"], state["sql"], state["result"], state["feedback"])
        step = await self._ask(runtime.context, "rewrite_query", message)
        return {"sql": prompts.extract_sql(step["output"]), "turns": state["turns"] + 1, "steps": [step]}

    async def answer_question(self, state: SQLState, runtime: Runtime[SQLContext]) -> SQLState:
        message = prompts.answer_message(state["question"], state["sql"], state["result"])
        step = await self._ask(runtime.context, "answer_question", message)
        return {"answer": step["output"].strip(), "steps": [step]}

    async def _ask(self, context: SQLContext, node: str, message: str) -> AgentStep:
        info = table_info(
            context.database,
            max_chars=self.table_info_truncate,
            example_values=self.example_values,
            show_keys=self.show_keys,
        )
        messages = [("system", prompts.system_message(info.text)), ("user", message)]
        extra: dict[str, Any] = {"extra_headers": context.headers(node)} if context.headers else {}
        reply = await context.model.ainvoke(messages, **extra)
        return AgentStep(agent=node, kind="llm", input=message, output=reply.text, ok=True)


def build_sql_graph(
    *,
    max_turns: int = 3,
    table_info_truncate: int | None = None,
    example_values: int = 3,
    show_keys: bool = True,
    execution_truncate: int = 2048,
    query_timeout_s: float = 5.0,
) -> CompiledStateGraph[SQLState, SQLContext, SQLState, SQLState]:
    """The compiled agent.

    ``max_turns`` counts queries: the one written and each rewrite. The last one allowed is run but not checked, since
    no verdict on it could change the answer. ``table_info_truncate``
    and ``execution_truncate`` limit the characters of the schema (cut on whole tables) and of a query result.
    """
    if max_turns < 1:
        raise ValueError(f"max_turns is {max_turns}; it counts the queries an agent may write, so it is at least 1")
    nodes = _Nodes(
        table_info_truncate=table_info_truncate,
        example_values=example_values,
        show_keys=show_keys,
        execution_truncate=execution_truncate,
        query_timeout_s=query_timeout_s,
    )
    graph = StateGraph(SQLState, context_schema=SQLContext)
    for node in (
        *(nodes.write_query, nodes.execute_query, nodes.check_query, nodes.rewrite_query),
        nodes.answer_question,
    ):
        graph.add_node(node.__name__, node)

    def end(state: SQLState) -> str:
        return "answer_question" if state.get("form") == "prose" else END

    graph.add_edge(START, "write_query")
    graph.add_edge("write_query", "execute_query")
    graph.add_conditional_edges(
        "execute_query",
        lambda state: end(state) if state["turns"] >= max_turns else "check_query",
        ["check_query", "answer_question", END],
    )
    graph.add_conditional_edges(
        "check_query",
        lambda state: end(state) if prompts.is_correct(state["feedback"]) else "rewrite_query",
        ["rewrite_query", "answer_question", END],
    )
    graph.add_edge("rewrite_query", "execute_query")
    return graph.compile()


@dataclass(kw_only=True)
class LangGraphBackend:
    """The graph above as a backend: one compiled graph and one HTTP connection pool for all rollouts."""

    agents = ("write_query", "check_query", "rewrite_query", "answer_question")

    max_turns: int = 3
    table_info_truncate: int | None = None
    example_values: int = 3
    show_keys: bool = True
    execution_truncate: int = 2048
    query_timeout_s: float = 5.0
    request_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        self._clients = Clients(timeout_s=self.request_timeout_s)
        self._graph = build_sql_graph(
            max_turns=self.max_turns,
            table_info_truncate=self.table_info_truncate,
            example_values=self.example_values,
            show_keys=self.show_keys,
            execution_truncate=self.execution_truncate,
            query_timeout_s=self.query_timeout_s,
        )

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question in the form that it asks for. Raises a :class:`adapters.BackendError`."""
        context = SQLContext(model=self._model(endpoint), database=question.database, headers=endpoint.agent_headers)
        config = {"recursion_limit": 4 * self.max_turns + 4}
        with typed_failures(endpoint):
            given: SQLState = {"question": question.text, "form": question.form, "steps": []}
            state = await self._graph.ainvoke(given, config, context=context)
        return Answer(text=state["answer" if question.form == "prose" else "sql"], steps=state["steps"])

    async def stop(self) -> None:
        """Close the connections."""
        await self._clients.close()

    def _model(self, endpoint: Endpoint) -> ChatOpenAI:
        client = self._clients.at(endpoint)
        return ChatOpenAI(
            model=endpoint.model,
            api_key=endpoint.api_key,
            root_async_client=client,
            async_client=client.chat.completions,
            client=object(),  # the synchronous client is never used
            **endpoint.sampling,
        )
