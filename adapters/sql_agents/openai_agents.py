"""The OpenAI Agents SDK text-to-SQL agent: one tool that runs queries.

The answer is the last query that ran or, for a question in prose, the final reply.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agents import Agent, FunctionTool, RunContextWrapper
from agents.tool_context import ToolContext

from groundwire.adapters._types import Answer, Endpoint, Question
from groundwire.adapters.openai_agents import OpenAIAgentsBackend
from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.sql_agents.named_prompts import Messages
from groundwire.adapters.sql_agents.toolkit import SQLToolkit, check_max_turns
from groundwire.tools.sql.syntax import fenced_sql
from groundwire.tools.types import AgentStep

__all__ = ["OpenAIAgentsSQLBackend", "SQLRun", "build_sql_agent"]

_AGENT = "sql_agent"
_messages: ContextVar[Messages | None] = ContextVar("messages", default=None)
"""The messages of the rollout that is running: the SDK hands neither an endpoint nor a question to the instructions."""
_NOT_A_QUERY = 'Error: the arguments are not {"sql": "..."}'


@dataclass(kw_only=True)
class SQLRun:
    """The context of one run."""

    database: str
    form: str
    steps: list[AgentStep]

    def last_query(self) -> str:
        """The last query that ran without an error; empty if none did."""
        return next((step["input"] for step in reversed(self.steps) if step["kind"] == "tool" and step["ok"]), "")


def build_sql_agent(toolkit: SQLToolkit) -> Agent[SQLRun]:
    """The agent: it reads the schema, runs queries with its tool, and answers with the last one or in prose."""

    def instructions(context: RunContextWrapper[SQLRun], agent: Agent[SQLRun]) -> str:
        schema = toolkit.schema(context.context.database)
        messages = _messages.get() or Messages(toolkit.prompts)
        return messages.write("prose_system" if context.context.form == "prose" else "tool_system", schema)

    async def invoke(context: ToolContext[SQLRun], arguments: str) -> str:
        run, sql = context.context, _sql_argument(arguments)
        text, ok = (_NOT_A_QUERY, False) if sql is None else await toolkit.query_or_error(run.database, sql)
        name = context.agent.name if context.agent else _AGENT
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
    return Agent(name=_AGENT, instructions=instructions, tools=[tool])


def _sql_argument(arguments: str) -> str | None:
    """The query in a tool call's arguments; None if they are malformed."""
    try:
        sql = json.loads(arguments)["sql"]
    except (ValueError, LookupError, TypeError):
        return None
    return sql if isinstance(sql, str) else None


@dataclass(kw_only=True)
class OpenAIAgentsSQLBackend(SQLToolkit, OpenAIAgentsBackend):
    """The backend ``openai-agents``.

    ``max_turns`` counts the turns with queries; one more call of the model is for the answer. A subclass with other
    agents around the SQL agent lists their names and returns the first of them from :meth:`build`.
    """

    max_turns: int = 2
    request_timeout_s: float = 120.0
    stream: bool = False
    calls_tools = True
    agents = (_AGENT,)
    prompt_names = {"sql": ("tool_system", "write"), "prose": ("prose_system", "ask")}

    def __post_init__(self) -> None:
        check_max_turns(self.max_turns)
        OpenAIAgentsBackend.__init__(
            self,
            self.build(),
            agents=self.agents,
            make_input=self._input,
            make_context=_context,
            read_answer=_answer,
            max_turns=self.max_turns + 1,
            request_timeout_s=self.request_timeout_s,
            stream=self.stream,
        )

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`adapters.BackendError`."""
        _messages.set(self.messages(endpoint.prompts, question.form))  # each rollout is a task of its own
        return await super().run(question, endpoint)

    def _input(self, question: Question) -> str:
        messages = _messages.get() or Messages(self.prompts)
        return messages.write("ask" if question.form == "prose" else "write", question.text)

    def build(self) -> Agent[Any]:
        """The agent that a run starts with."""
        return build_sql_agent(self)


def _context(question: Question, steps: list[AgentStep]) -> SQLRun:
    return SQLRun(database=question.database, form=question.form, steps=steps)


def _answer(question: Question, run: SQLRun, output: str) -> str:
    if question.form == "prose":
        return output.strip()
    sql = fenced_sql(output)
    return run.last_query() if sql is None else sql
