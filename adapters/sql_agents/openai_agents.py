"""The OpenAI Agents SDK text-to-SQL agent: one tool that runs queries.

The answer is the last query that ran or, for a question in prose, the final reply. If the turns run out it is the last
query as well.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
)
from agents.models.interface import Model
from agents.tool_context import ToolContext
from openai import AsyncOpenAI, DefaultAioHttpClient

from groundwire.adapters.sql_agents.prompts import QUERY_TOOL, texts, write
from groundwire.adapters.sql_agents.toolkit import SQLToolkit, sql_backend
from groundwire.tools.sql.answers import fenced_sql
from groundwire.tools.types import AgentStep

AGENTS = ("sql_agent",)
PROMPTS = {"sql": ("tool_system", "write"), "prose": ("prose_system", "ask")}
"""The names of the prompts for each form of answers; they make the first request."""
_NOT_A_QUERY = 'Error: the arguments are not {"sql": "..."}'
Query = Callable[[str, str], Awaitable[tuple[str, bool]]]


@dataclass(kw_only=True)
class SQLRun:
    """The context of one run."""

    database: str
    steps: list[AgentStep] = field(default_factory=list)

    def last_query(self) -> str:
        """The last query that ran without an error; empty if none did."""
        return next((step["input"] for step in reversed(self.steps) if step["ok"]), "")


def build_sql_agent(
    model: Model | str, toolkit: SQLToolkit, system: Callable[[str], str], query: Query | None = None
) -> Agent[SQLRun]:
    """The agent: it reads the schema, runs queries with its tool, and answers with the last one or in prose.

    ``system`` makes the instructions from the schema. ``query`` runs a query in place of the toolkit's.
    """
    run_query = query or toolkit.query

    def instructions(context: RunContextWrapper[SQLRun], agent: Agent[SQLRun]) -> str:
        return system(toolkit.schema(context.context.database))

    async def invoke(context: ToolContext[SQLRun], arguments: str) -> str:
        run, sql = context.context, _sql_argument(arguments)
        text, ok = (_NOT_A_QUERY, False) if sql is None else await run_query(run.database, sql)
        asked = arguments if sql is None else sql
        run.steps.append(AgentStep(agent=AGENTS[0], kind="tool", input=asked, output=text, ok=ok))
        return text

    tool = FunctionTool(
        name=QUERY_TOOL["name"],
        description=QUERY_TOOL["description"],
        params_json_schema=QUERY_TOOL["parameters"],
        strict_json_schema=QUERY_TOOL["strict"],
        on_invoke_tool=invoke,
    )
    return Agent(name=AGENTS[0], instructions=instructions, tools=[tool], model=model)


def _sql_argument(arguments: str) -> str | None:
    """The query in a tool call's arguments; None if they are malformed."""
    try:
        sql = json.loads(arguments)["sql"]
    except (ValueError, LookupError, TypeError):
        return None
    return sql if isinstance(sql, str) else None


@asynccontextmanager
async def sql_agent(
    toolkit: SQLToolkit,
    *,
    form: str,
    prompts: Mapping[str, str] | None = None,
    queries: Callable[[SQLToolkit], AbstractAsyncContextManager[Query]] = lambda toolkit: nullcontext(toolkit.query),
) -> AsyncIterator[Callable[[str, str], Awaitable[dict[str, Any]]]]:
    """A function that answers a question; its tool runs the queries as ``queries`` says.

    ``max_turns`` counts the turns with queries; one more call of the model is for the answer. Connections are closed at
    the end.
    """
    own, (system, user) = texts(toolkit.prompt_profile, PROMPTS[form], prompts), PROMPTS[form]
    config = RunConfig(tracing_disabled=True, tool_not_found_behavior="return_error_to_model")
    async with DefaultAioHttpClient() as connections, queries(toolkit) as query:
        # A call that the client repeats by itself would be a sample without a reward.
        client = AsyncOpenAI(http_client=connections, max_retries=0, timeout=120)
        model = OpenAIChatCompletionsModel("gpt-5-mini", client)
        agent = build_sql_agent(model, toolkit, lambda schema: write(system, schema, own=own), query)
        max_turns = toolkit.max_turns + 1

        async def answer(question: str, database: str) -> dict[str, Any]:
            run, message = SQLRun(database=database), write(user, question, own=own)
            try:
                result = await Runner.run(agent, message, context=run, max_turns=max_turns, run_config=config)
                output = str(result.final_output)
            except MaxTurnsExceeded:
                output = ""
            if form == "prose":
                return {"answer": output.strip(), "steps": run.steps}
            sql = fenced_sql(output)
            return {"sql": run.last_query() if sql is None else sql, "steps": run.steps}

        yield answer


backend = sql_backend("openai-agents", sql_agent, AGENTS, PROMPTS)
"""The backend ``openai-agents``."""
