"""The OpenAI Agents SDK: an agent that asks a database, and any agent that you built with it.

What it answers with is what the question asks for: the last query that ran, or its final reply.

An agent is taken as its author wrote it: the model, its sampling and the calling agent's name are put in from outside,
through the SDK's run configuration, so handoffs and agents used as tools are traced under their own names. Nothing of
the process is changed: tracing export is off for these runs only.

Turns that run out are no fault of the infrastructure. The policy had its chance and did not answer, so the rollout ends
with what it had (its last query that ran, else nothing) and is scored like any other answer. The same holds for a tool
call that makes no sense: the model reads what is wrong with it, as the SDK does it, and may try again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    ModelResponse,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    RunHooks,
    Runner,
)
from agents.models.chatcmpl_helpers import HEADERS_OVERRIDE
from agents.run_config import CallModelData, ModelInputData
from agents.tool_context import ToolContext

from groundwire.adapters._openai_client import Clients, typed_failures
from groundwire.adapters._types import Answer, Endpoint, Question, ToolError
from groundwire.adapters.sql_agents import prompts
from groundwire.tools.schema import table_info
from groundwire.tools.sql import DatabaseError, QueryError, render, run_query
from groundwire.tools.types import AgentStep, AnswerForm

__all__ = ["OpenAIAgentsBackend", "SQLRun", "build_sql_agent"]

SQL_AGENT = "sql_agent"
_NOT_A_QUERY = 'Error: the arguments are not {"sql": "..."}'
_SETTINGS = frozenset(setting.name for setting in fields(ModelSettings))


@dataclass(kw_only=True)
class SQLRun:
    """The context of one run: the database it asks, what it should answer with, and what it did."""

    database: str
    form: AnswerForm = "sql"
    steps: list[AgentStep] = field(default_factory=list)
    failure: Exception | None = None
    """What broke a tool. The SDK raises an error of its own in its place."""

    def last_query(self) -> str:
        """The last query that ran without an error; empty where none did."""
        return next((step["input"] for step in reversed(self.steps) if step["kind"] == "tool" and step["ok"]), "")


Query = Callable[[SQLRun, str], Awaitable[str]]
"""Runs a query and returns what the model reads. Raises :class:`groundwire.tools.sql.QueryError` or :class:`ToolError`.
"""


def local_query(*, execution_truncate: int = 2048, query_timeout_s: float = 5.0) -> Query:
    """Queries are run in this process."""

    async def query(run: SQLRun, sql: str) -> str:
        # In a thread: a query may take seconds, and every other rollout runs on this loop.
        result = await asyncio.to_thread(run_query, run.database, sql, timeout_s=query_timeout_s, max_rows=100)
        return render(result, max_chars=execution_truncate)

    return query


def build_sql_agent(
    *,
    query: Query,
    table_info_truncate: int | None = None,
    example_values: int = 3,
    show_keys: bool = True,
    execution_truncate: int = 2048,
) -> Agent[SQLRun]:
    """The agent: it reads the schema, runs queries with its tool, and answers with the final one or in sentences."""

    def instructions(context: RunContextWrapper[SQLRun], agent: Agent[SQLRun]) -> str:
        info = table_info(
            context.context.database, max_chars=table_info_truncate, example_values=example_values, show_keys=show_keys
        )
        prose = context.context.form == "prose"
        return prompts.prose_system_message(info.text) if prose else prompts.tool_system_message(info.text)

    async def invoke(context: ToolContext[SQLRun], arguments: str) -> str:
        run, sql, ok = context.context, _sql(arguments), False
        if sql is None:
            text = _NOT_A_QUERY
        else:
            try:
                text, ok = await query(run, sql), True
            except (DatabaseError, ToolError) as error:
                run.failure = error
                raise
            except QueryError as error:
                text = f"Error: {error}"[:execution_truncate]
        name = context.agent.name if context.agent else SQL_AGENT
        run.steps.append(
            AgentStep(agent=name, kind="tool", input=arguments if sql is None else sql, output=text, ok=ok)
        )
        return text

    tool = FunctionTool(
        name=prompts.QUERY_TOOL["name"],
        description=prompts.QUERY_TOOL["description"],
        params_json_schema=prompts.QUERY_TOOL["parameters"],
        strict_json_schema=prompts.QUERY_TOOL["strict"],
        on_invoke_tool=invoke,
    )
    return Agent(name=SQL_AGENT, instructions=instructions, tools=[tool])


@dataclass(kw_only=True)
class OpenAIAgentsBackend:
    """The agent above as a backend: built once, and one HTTP connection pool for all rollouts.

    ``max_turns`` counts the turns with queries; one more call of the model is for the answer. To train an agent of your
    own, name its agents in a subclass and return the first of them from :meth:`build`.
    """

    agents = (SQL_AGENT,)

    max_turns: int = 3
    table_info_truncate: int | None = None
    example_values: int = 3
    show_keys: bool = True
    execution_truncate: int = 2048
    query_timeout_s: float = 5.0
    request_timeout_s: float = 120.0
    stream: bool = False
    """Whether the model is asked for streams; the answers are the same."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns is {self.max_turns}; it counts the turns with queries, so it is at least 1")
        self._clients = Clients(timeout_s=self.request_timeout_s)
        self._agent = self.build()

    def build(self) -> Agent[SQLRun]:
        """The agent that a run starts with."""
        return build_sql_agent(
            query=local_query(execution_truncate=self.execution_truncate, query_timeout_s=self.query_timeout_s),
            table_info_truncate=self.table_info_truncate,
            example_values=self.example_values,
            show_keys=self.show_keys,
            execution_truncate=self.execution_truncate,
        )

    async def stop(self) -> None:
        """Close the connections."""
        await self._clients.close()

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question in the form that it asks for. Raises a :class:`adapters.BackendError`."""
        run = SQLRun(database=question.database, form=question.form)
        prose = question.form == "prose"
        message = prompts.ask_message(question.text) if prose else prompts.write_message(question.text)
        with typed_failures(endpoint):
            try:
                output = await self._output(run, message, endpoint)
            except MaxTurnsExceeded:
                output = ""
            except Exception:
                if run.failure is not None:
                    raise run.failure from None
                raise
        if prose:
            return Answer(text=output.strip(), steps=run.steps)
        sql = prompts.fenced_sql(output)
        return Answer(text=run.last_query() if sql is None else sql, steps=run.steps)

    async def _output(self, run: SQLRun, message: str, endpoint: Endpoint) -> str:
        config = _run_config(OpenAIChatCompletionsModel(endpoint.model, self._clients.at(endpoint)), endpoint)
        options: dict[str, Any] = {"context": run, "max_turns": self.max_turns + 1, "run_config": config}
        if not self.stream:
            return str((await Runner.run(self._agent, message, hooks=_Tracer(), **options)).final_output)
        result = Runner.run_streamed(self._agent, message, hooks=_Tracer(), **options)
        async for _ in result.stream_events():  # cancelled, it cancels the run itself; twice would leak the connection
            pass
        return str(result.final_output)


def _sql(arguments: str) -> str | None:
    """The query in a tool call's arguments, or None where they are something else."""
    try:
        sql = json.loads(arguments)["sql"]
    except (ValueError, LookupError, TypeError):
        return None
    return sql if isinstance(sql, str) else None


def _run_config(model: OpenAIChatCompletionsModel, endpoint: Endpoint) -> RunConfig:
    """What puts an author's agent on ``endpoint``, whichever models and settings it names itself."""

    def name_agent(data: CallModelData[Any]) -> ModelInputData:
        # It is called right before each call of the model, in the same task: after a handoff and in an agent that
        # serves as a tool the name is theirs.
        HEADERS_OVERRIDE.set(endpoint.agent_headers(data.agent.name))
        return data.model_data

    known = {name: value for name, value in endpoint.sampling.items() if name in _SETTINGS}
    others = {name: value for name, value in endpoint.sampling.items() if name not in _SETTINGS}
    return RunConfig(
        model=model,
        model_settings=ModelSettings(**known, extra_args=others),
        tracing_disabled=True,
        call_model_input_filter=name_agent,
        tool_not_found_behavior="return_error_to_model",
    )


class _Tracer(RunHooks[SQLRun]):
    """Writes the model's turns into the run's trace."""

    async def on_llm_end(
        self, context: RunContextWrapper[SQLRun], agent: Agent[SQLRun], response: ModelResponse
    ) -> None:
        parts = [
            item.name + item.arguments if item.type == "function_call" else "".join(map(_text, item.content))
            for item in response.output
            if item.type in ("function_call", "message")
        ]
        context.context.steps.append(
            AgentStep(agent=agent.name, kind="llm", input="", output="\n".join(parts), ok=True)
        )


def _text(part: Any) -> str:
    return part.text if part.type == "output_text" else ""
