"""A text-to-SQL agent without a framework: one async function.

    groundwire run --backend custom --agent examples.custom_agent:answer

It writes a query, runs it, and writes another one if it failed. ``endpoint`` has the address of the model: calls to its
``base_url`` are traced, and ``agent_headers`` name the calling step for ``--agent-match``.
"""

from __future__ import annotations

import asyncio

import httpx
import openai

from groundwire.adapters import Answer, Endpoint, Question
from groundwire.adapters.sql_agents import prompts
from groundwire.tools.schema import table_info
from groundwire.tools.sql import DatabaseError, QueryError, render, run_query
from groundwire.tools.types import AgentStep

# One client for all rollouts: a new one costs more than a call. A retry would be a sample without a reward.
client = openai.AsyncOpenAI(api_key="none", http_client=httpx.AsyncClient(timeout=120, trust_env=False), max_retries=0)


async def answer(question: Question, endpoint: Endpoint) -> Answer:
    """Answer one question with a query."""
    steps: list[AgentStep] = []
    system = prompts.write("system", table_info(question.database, example_values=0, show_keys=False).text)

    async def ask(agent: str, message: str) -> str:
        reply = await client.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key).chat.completions.create(
            model=endpoint.model,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": message}],
            extra_headers=endpoint.agent_headers(agent),
            **endpoint.sampling,
        )
        text = reply.choices[0].message.content or ""
        steps.append(AgentStep(agent=agent, kind="llm", input=message, output=text, ok=True))
        return prompts.extract_sql(text)

    sql = await ask("write", prompts.write("write", question.text))
    try:
        result = await asyncio.to_thread(run_query, question.database, sql, max_rows=100)
        steps.append(AgentStep(agent="execute", kind="tool", input=sql, output=render(result, max_chars=72), ok=True))
    except DatabaseError:
        raise  # the file is broken: the rollout fails and is not counted as a wrong answer
    except QueryError as error:
        failed = f"Error: {error}"[:72]
        steps.append(AgentStep(agent="execute", kind="tool", input=sql, output=failed, ok=False))
        sql = await ask("repair", prompts.write("rewrite", question.text, sql, failed, prompts.INCORRECT))
    return Answer(text=sql, steps=steps)


answer.agents = ("write", "repair")  # type: ignore[attr-defined]
"""The names that ``--agent-match`` may select."""
