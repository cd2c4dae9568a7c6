"""Agents as their authors write them: with their own clients, models and prompts, and no line about training."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from typing import Any, TypedDict

import aiohttp
import boto3
import httpx
import openai
import requests
from agentlightning.emitter import emit_reward
from agents import Agent, RunContextWrapper, function_tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from opentelemetry import trace
from pydantic import BaseModel

llm = ChatOpenAI(model="gpt-5-mini", temperature=0.7, api_key="sk-of-the-author")  # type: ignore[arg-type]
helper = openai.AsyncOpenAI(api_key="sk-of-the-author", base_url="https://openrouter.example/api/v1", max_retries=0)


class State(TypedDict, total=False):
    """The state of the graph."""

    question: str
    database: str
    query: str
    critique: str


async def write(state: State) -> State:
    reply = await llm.ainvoke(f"write {state['question']}")
    return {"query": reply.text}


def check(state: State) -> State:
    """A synchronous node."""
    return {"critique": llm.invoke(f"check {state['question']}").text}


builder = StateGraph(State)
builder.add_node("writer", write)
builder.add_node("checker", check)
builder.add_edge(START, "writer")
builder.add_edge("writer", "checker")
builder.add_edge("checker", END)
graph = builder.compile()


async def _ask(client: Any, text: str, model: str = "gpt-5-mini") -> str:
    reply = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
    return str(reply.choices[0].message.content)


async def many_clients(task: dict[str, Any]) -> str:
    """Calls through each HTTP client, in tasks, threads and a pool."""
    question = task["question"]
    body = {"model": "gpt-5-mini", "messages": [{"role": "user", "content": f"other {question}"}]}
    url, headers = "https://api.openai.com/v1/chat/completions", {"Authorization": "Bearer sk-of-the-author"}

    def in_thread() -> None:
        requests.post(url, json=body, headers=headers, timeout=600).raise_for_status()

    thread = threading.Thread(target=in_thread)
    thread.start()
    answers = await asyncio.gather(_ask(helper, f"first {question}"), _ask(helper, f"second {question}"))
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, in_thread)
    await asyncio.to_thread(thread.join)
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
        reply.raise_for_status()
    return answers[0]


async def raises_for_status(task: dict[str, Any]) -> str:
    """A client that looks at no status itself."""
    body = {"model": "gpt-5-mini", "messages": [{"role": "user", "content": task["question"]}]}
    session = aiohttp.ClientSession("https://api.openai.com", raise_for_status=True)
    async with session, session.post("/v1/chat/completions", json=body) as reply:
        return str((await reply.json())["choices"][0]["message"]["content"])


async def graded(task: dict[str, Any]) -> str:
    """Scores the calls of parallel branches after all have their replies."""
    replied = [asyncio.Event() for _ in range(3)]

    async def branch(number: int) -> str:
        answer = await _ask(helper, f"branch {number}")
        replied[number].set()
        await asyncio.gather(*(each.wait() for each in replied))
        emit_reward(number / 4)
        return answer

    return (await asyncio.gather(*map(branch, range(3))))[0]


def blocking(task: Any) -> str:
    """A plain function of the task."""
    client = openai.OpenAI(api_key="sk-of-the-author")
    reply = client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": task.question}])
    return str(reply.choices[0].message.content)


async def two_models(task: Any) -> str:
    """The second model stays with its own provider."""
    client = openai.AsyncOpenAI(api_key="sk-of-the-author", base_url=task["provider"], max_retries=0)
    await _ask(client, "rate this", model="judge-1")
    return await _ask(client, task["question"], model="writer-1")


PROVIDER_KEYS = {
    "GEMINI_API_KEY": "key-of-the-author",
    "AWS_ACCESS_KEY_ID": "id-of-the-author",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-author",
    "AWS_SESSION_TOKEN": "token-of-the-author",
}


async def asks_providers(task: dict[str, Any]) -> str:
    """A call to Google or to Bedrock."""
    client, key = task["client"], os.environ["GEMINI_API_KEY"]
    url = f"https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-flash:generateContent?key={key}"
    body = {"contents": [{"parts": [{"text": task["question"]}]}]}
    reply: Any = {}
    if client == "requests":
        response = await asyncio.to_thread(requests.post, url, json=body, headers={"x-goog-api-key": key})
        response.raise_for_status()
        reply = response.json()
    elif client == "httpx":
        async with httpx.AsyncClient() as http:
            reply = (await http.post(url, json=body, headers={"x-goog-api-key": key})).json()
    elif client == "aiohttp":
        async with aiohttp.ClientSession() as session:
            answer = await session.post(url, json=body, headers={"x-goog-api-key": key})
            answer.raise_for_status()
            reply = await answer.json()
    if reply:
        return str(reply["candidates"][0]["content"]["parts"][0]["text"])
    bedrock = boto3.client("bedrock-runtime", region_name="us-east-1")
    request: Any = {"modelId": "us.a:0", "messages": [{"role": "user", "content": [{"text": task["question"]}]}]}
    if client == "boto3":
        reply = await asyncio.to_thread(bedrock.converse, **request)
        return str(reply["output"]["message"]["content"][0]["text"])
    events = await asyncio.to_thread(lambda: list(bedrock.converse_stream(**request)["stream"]))
    return "".join(event["contentBlockDelta"]["delta"]["text"] for event in events if "contentBlockDelta" in event)


async def calls_nobody(task: Any) -> str:
    async with aiohttp.ClientSession() as session, session.get(task["provider"] + "/models"):
        return "SELECT 1"


async def counts_tokens(task: dict[str, Any]) -> str:
    """Asks for the length of a prompt and for no reply."""
    body = {"model": "claude", "messages": [{"role": "user", "content": task["question"]}]}
    async with httpx.AsyncClient() as client:
        await client.post("https://api.anthropic.com/v1/messages/count_tokens", json=body)
    return "SELECT 1"


async def silent(task: Any) -> str:
    return "SELECT 1"


class Query(BaseModel):
    """A typed output."""

    sql: str


typed_agent = Agent(name="typed", instructions="Answer with SQL.", output_type=Query)


async def parses(task: Any) -> str:
    """An agent that cannot use every reply."""
    return str(json.loads(await _ask(helper, task["question"]))["sql"])


async def parses_typed(task: Any) -> str:
    """The client itself reads the typed output."""
    reply = await helper.chat.completions.parse(
        model="gpt-5-mini", messages=[{"role": "user", "content": task["question"]}], response_format=Query
    )
    return reply.choices[0].message.parsed.sql  # type: ignore[union-attr]


@function_tool
def run_query(context: RunContextWrapper[Any], query: str) -> str:
    """Run a query."""
    return f"rows of {context.context.database}"


sql_agent = Agent(name="sql", instructions="Answer with SQL.", tools=[run_query])
triage_agent = Agent(name="triage", instructions="Hand over.", handoffs=[sql_agent])


async def speaks_opentelemetry(task: Any) -> str:
    """As frameworks with OTel's GenAI conventions do: the agent's span is around the span of the call."""
    tracer = trace.get_tracer("framework")
    with tracer.start_as_current_span("invoke_agent", attributes={"gen_ai.agent.name": "analyst"}):
        first = await _ask(helper, "first")
        with tracer.start_as_current_span("chat"):
            await _ask(helper, "second")
    await _ask(helper, "third")
    return first


async def of_two(question: Any, endpoint: Any) -> str:
    return "SELECT 1"


async def mistyped(task: Any) -> str:
    return str(task.typo)
