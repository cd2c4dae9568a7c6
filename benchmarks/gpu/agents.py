"""Agents for the GPU suite's figures: one call, as verl's own single-turn loop makes it; and between one and eight."""

from __future__ import annotations

import zlib
from typing import Any

from groundwire.adapters import Endpoint, Question
from groundwire.adapters._openai_client import Clients
from groundwire.adapters.sql_agents import prompts
from groundwire.tools.schema import table_info

_clients = Clients(timeout_s=600)


def messages(question: str, database: str) -> list[dict[str, str]]:
    """What both loops ask."""
    system = prompts.system_message(table_info(database, max_chars=1500, example_values=0, show_keys=False).text)
    return [{"role": "system", "content": system}, {"role": "user", "content": prompts.write_message(question)}]


async def once(question: Question, endpoint: Endpoint) -> str:
    """One call."""
    return await _ask(endpoint, messages(question.text, question.database))


async def uneven(question: Question, endpoint: Endpoint) -> str:
    """One call for most questions, eight for one in eight: what a batch waits for."""
    said: list[Any] = messages(question.text, question.database)
    calls = 8 if zlib.crc32(question.text.encode()) % 8 == 0 else 1
    for _ in range(calls):
        said.append({"role": "assistant", "content": await _ask(endpoint, said)})
        said.append({"role": "user", "content": "Write a better query."})
    return str(said[-2]["content"])


async def _ask(endpoint: Endpoint, said: list[Any]) -> str:
    reply = await _clients.at(endpoint).chat.completions.create(
        model=endpoint.model, messages=said, extra_headers=endpoint.agent_headers("solo"), **endpoint.sampling
    )
    return reply.choices[0].message.content or ""
