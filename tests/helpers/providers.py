"""Clients of Google's, Bedrock's and Ollama's APIs: the requests are those of their makers' packages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import boto3
import httpx
from botocore.config import Config
from wire import Bench

GEMINI_MODEL, BEDROCK_MODEL = "gemini-2.5-flash", "arn:aws:bedrock:us-east-1:1:inference-profile/us.any-model-v1:0"


class ApiError(Exception):
    """An error reply."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


async def post(url: str, request: Any, **headers: str) -> httpx.Response:
    """The response to a request. Raises :class:`ApiError`."""
    async with httpx.AsyncClient(trust_env=False, timeout=600) as client:
        response = await client.post(url, json=request, headers=headers)
    if response.status_code != 200:
        raise ApiError(response.status_code, response.json())
    return response


async def gemini_replies(b: Bench, stream: bool = False, *, sse: bool = True, **request: Any) -> list[Any]:
    """The replies, of a stream all pieces."""
    method = "streamGenerateContent" if stream else "generateContent"
    query = "?alt=sse" if stream and sse else ""
    url = f"{b.root}/v1beta/models/{GEMINI_MODEL}:{method}{query}"
    response = await post(url, request, **{"x-goog-api-key": "none"})
    if not stream:
        return [response.json()]
    if not sse:
        assert response.headers["content-type"] == "application/json"
        return list(response.json())
    assert response.headers["content-type"] == "text/event-stream"
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


async def gemini_ask(b: Bench, stream: bool = False, **request: Any) -> Any:
    """The content of a reply, the texts of a stream joined."""
    parts: list[Any] = []
    for reply in await gemini_replies(b, stream, **request):
        for part in reply["candidates"][0]["content"]["parts"]:
            if parts and part.keys() == parts[-1].keys() == {"text"}:
                parts[-1]["text"] += part["text"]
            elif part != {"text": ""}:
                parts.append(part)
    return {"role": "model", "parts": parts}


def bedrock_client(url: str) -> Any:
    """A client of AWS's package, which signs its requests."""
    return boto3.client(
        "bedrock-runtime",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=Config(retries={"total_max_attempts": 1}, proxies={}),
    )


def bedrock_events(client: Any, **request: Any) -> list[Any]:
    """All events of a stream."""
    return list(client.converse_stream(modelId=BEDROCK_MODEL, **request)["stream"])


async def bedrock_ask(b: Bench, stream: bool = False, **request: Any) -> Any:
    """The message of a reply."""
    client = bedrock_client(b.root)
    if not stream:
        return (await asyncio.to_thread(client.converse, modelId=BEDROCK_MODEL, **request))["output"]["message"]
    blocks: list[Any] = []
    for event in await asyncio.to_thread(bedrock_events, client, **request):
        if "contentBlockStart" in event:
            blocks.append({"toolUse": {**event["contentBlockStart"]["start"]["toolUse"], "input": ""}})
        elif "contentBlockDelta" in event:
            delta = event["contentBlockDelta"]["delta"]
            if "toolUse" in delta:
                blocks[-1]["toolUse"]["input"] += delta["toolUse"]["input"]
            elif "reasoningContent" in delta:
                if event["contentBlockDelta"]["contentBlockIndex"] == len(blocks):
                    blocks.append({"reasoningContent": {"reasoningText": {"text": ""}}})
                blocks[-1]["reasoningContent"]["reasoningText"]["text"] += delta["reasoningContent"]["text"]
            elif event["contentBlockDelta"]["contentBlockIndex"] == len(blocks):
                blocks.append(dict(delta))
            else:
                blocks[-1]["text"] += delta["text"]
    for block in blocks:
        if "toolUse" in block:
            block["toolUse"]["input"] = json.loads(block["toolUse"]["input"])
    return {"role": "assistant", "content": blocks}


async def ollama_replies(b: Bench, stream: bool = False, **request: Any) -> list[Any]:
    """The replies, of a stream all lines."""
    body = {"model": "llama3.2", **request} if stream else {"model": "llama3.2", "stream": False, **request}
    response = await post(f"{b.root}/api/chat", body)
    assert response.headers["content-type"].startswith("application/x-ndjson" if stream else "application/json")
    return [json.loads(line) for line in response.text.splitlines()]


async def ollama_ask(b: Bench, stream: bool = False, **request: Any) -> Any:
    """The message of a reply."""
    message: Any = {"role": "assistant", "content": ""}
    for reply in await ollama_replies(b, stream, **request):
        for name in reply["message"].keys() & {"content", "thinking"}:
            message[name] = message.get(name, "") + reply["message"][name]
        message["tool_calls"] = message.get("tool_calls", []) + reply["message"].get("tool_calls", [])
    return message
