"""The OpenAI Agents SDK text-to-SQL agent: one tool that runs queries.

The answer is the last query that ran or, for a question in prose, the final reply.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agents import Agent, FunctionTool, RunContextWrapper
from agents.tool_context import ToolContext

from groundwire.adapters._types import Question
from groundwire.adapters.openai_agents import OpenAIAgentsBackend
from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.sql_agents.toolkit import SQLToolkit, check_max_turns
from groundwire.tools.types import AgentStep, AnswerForm

__all__ = ["OpenAIAgentsSQLBackend", "SQLRun", "build_sql_agent"]

_AGENT = "sql_agent"
_NOT_A_QUERY = 'Error: the arguments are not {"sql": "..."}'


@dataclass(kw_only=True)
class SQLRun:
    """The context of one run."""

    database: str
    form: AnswerForm
    steps: list[AgentStep]

    def last_query(self) -> str:
        """The last query that ran without an error; empty if none did."""
        return next((step["input"] for step in reversed(self.steps) if step["kind"] == "tool" and step["ok"]), "")


def build_sql_agent(toolkit: SQLToolkit) -> Agent[SQLRun]:
    """The agent: it reads the schema, runs queries with its tool, and answers with the last one or in prose."""

    def instructions(context: RunContextWrapper[SQLRun], agent: Agent[SQLRun]) -> str:
        schema = toolkit.schema(context.context.database)
        prose = context.context.form == "prose"
        write = toolkit.prompts.prose_system_message if prose else toolkit.prompts.tool_system_message
        return str(write(schema))

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

    max_turns: int = 3
    request_timeout_s: float = 120.0
    stream: bool = False
    agents = (_AGENT,)

    def __post_init__(self) -> None:
        check_max_turns(self.max_turns)
        messages = self.prompts
        OpenAIAgentsBackend.__init__(
            self,
            self.build(),
            agents=self.agents,
            make_input=lambda question: (messages.ask_message if question.form == "prose" else messages.write_message)(
                question.text
            ),
            make_context=_context,
            read_answer=_answer,
            max_turns=self.max_turns + 1,
            request_timeout_s=self.request_timeout_s,
            stream=self.stream,
        )

    def build(self) -> Agent[Any]:
        """The agent that a run starts with."""
        return build_sql_agent(self)


def _context(question: Question, steps: list[AgentStep]) -> SQLRun:
    return SQLRun(database=question.database, form=question.form, steps=steps)


def _answer(question: Question, run: SQLRun, output: str) -> str:
    if question.form == "prose":
        return output.strip()
    sql = prompts.fenced_sql(output)
    return run.last_query() if sql is None else sql
