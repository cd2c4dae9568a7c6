"""The SQL agent of the OpenAI Agents SDK with streamed replies, and behind an agent that hands over to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, RunConfig, Runner
from openai import AsyncOpenAI

from groundwire.adapters.sql_agents.openai_agents import SQLRun, build_sql_agent
from groundwire.adapters.sql_agents.prompts import write
from groundwire.adapters.sql_agents.toolkit import SQLToolkit
from groundwire.tools.sql.answers import fenced_sql

Answering = Callable[[str, str], Awaitable[dict[str, Any]]]


@asynccontextmanager
async def streamed(*, max_turns: int = 3, stream: bool = True, triage: bool = False) -> AsyncIterator[Answering]:
    async with AsyncOpenAI(max_retries=0) as client:
        model = OpenAIChatCompletionsModel("mine", client)
        agent = build_sql_agent(model, SQLToolkit(), lambda schema: write("tool_system", schema))
        if triage:
            agent = Agent(name="triage", instructions="Hand over.", handoffs=[agent], model=model)
        config = RunConfig(tracing_disabled=True, tool_not_found_behavior="return_error_to_model")

        async def answer(question: str, database: str) -> dict[str, Any]:
            run, output = SQLRun(database=database), ""
            options: dict[str, Any] = {"context": run, "max_turns": max_turns + 1, "run_config": config}
            try:
                if stream:
                    result: Any = Runner.run_streamed(agent, write("write", question), **options)
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await Runner.run(agent, write("write", question), **options)
                output = str(result.final_output)
            except MaxTurnsExceeded:
                pass
            sql = fenced_sql(output)
            return {"sql": run.last_query() if sql is None else sql, "steps": run.steps}

        yield answer
