"""Agents for the GPU suite: one call, as in verl's own single-turn agent loop, one to eight, and constrained ones.

Models with random weights get random rewards: the update leaves out groups of equal rewards.
"""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import openai

from groundwire.adapters import Endpoint, Question
from groundwire.adapters.sql_agents import prompts
from groundwire.tools.schema import table_info

_client = openai.AsyncOpenAI(api_key="none", max_retries=0, timeout=600, http_client=openai.DefaultAioHttpClient())
"""One for all rollouts: a new one costs more than a call."""


def sql_messages(question: str, database: str, *, full: bool = False) -> list[dict[str, str]]:
    """The messages of a first call, for both agent loops; ``full`` adds keys, example values and more tables."""
    schema = table_info(
        database, max_chars=6000 if full else 1500, example_values=2 if full else 0, show_keys=full
    ).text
    return [
        {"role": "system", "content": prompts.write("system", schema)},
        {"role": "user", "content": prompts.write("write", question)},
    ]


async def once(question: Question, endpoint: Endpoint) -> str:
    """One call."""
    return await _ask(endpoint, sql_messages(question.text, question.database))


async def once_full(question: Question, endpoint: Endpoint) -> str:
    """One call with the longer prompt."""
    return await _ask(endpoint, sql_messages(question.text, question.database, full=True))


async def uneven(question: Question, endpoint: Endpoint) -> str:
    """Eight calls for one question in eight, one call for the others."""
    messages: list[Any] = sql_messages(question.text, question.database)
    calls = 8 if zlib.crc32(question.text.encode()) % 8 == 0 else 1
    for _ in range(calls):
        messages.append({"role": "assistant", "content": await _ask(endpoint, messages)})
        messages.append({"role": "user", "content": "Write a better query."})
    return str(messages[-2]["content"])


_SCHEMA = {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]}
_TOOL = {"type": "function", "function": {"name": "run_sql", "parameters": _SCHEMA}}


async def constrained(question: Question, endpoint: Endpoint) -> str:
    """A reply with a JSON schema and one with a required tool. Raises if a complete one has another form."""
    client, model, headers = (
        _client.with_options(base_url=endpoint.base_url),
        endpoint.model,
        endpoint.agent_headers("solo"),
    )
    messages: Any = sql_messages(question.text, question.database)
    formats: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}},
        {"tools": [_TOOL], "tool_choice": "required"},
    ]
    answer = ""
    for given in formats:
        reply = await client.chat.completions.create(
            model=model, messages=messages, extra_headers=headers, **given, **endpoint.sampling
        )
        choice = reply.choices[0]
        if choice.finish_reason == "length":
            continue
        calls = choice.message.tool_calls or []
        text = calls[0].function.arguments if "tools" in given else choice.message.content or ""
        answer = str(json.loads(text)["sql"])
    return answer


_DIGIT = {"type": "json_schema", "json_schema": {"name": "choice", "schema": {"enum": list(range(10))}}}


async def choose_digit(question: Question, endpoint: Endpoint) -> str:
    """A digit of the policy's choice."""
    return await _ask(endpoint, [{"role": "user", "content": question.text}], response_format=_DIGIT)


async def chosen_digit(task: Any, answer: str, steps: Any) -> float:
    """A reward of 0 for ``0`` to 1 for ``9``."""
    return int(answer) / 9


async def coin(task: Any, answer: str, steps: Any) -> float:
    """A reward of 0 or 1 without a reason."""
    return float(random.random() < 0.5)


async def _ask(endpoint: Endpoint, messages: list[Any], **options: Any) -> str:
    headers = endpoint.agent_headers("solo")
    reply = await _client.with_options(base_url=endpoint.base_url).chat.completions.create(
        model=endpoint.model, messages=messages, extra_headers=headers, **options, **endpoint.sampling
    )
    return reply.choices[0].message.content or ""
