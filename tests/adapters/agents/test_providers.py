"""No call of a rollout leaves for a known provider of models by accident, whatever carries it."""

from __future__ import annotations

import asyncio
import http.client
import socket
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import requests

from groundwire.adapters import AgentSetupError, BackendError, Endpoint, Question, ToolError, agent_backend
from groundwire.adapters.agents.providers import is_provider
from groundwire.adapters.agents.redirection import AttemptCalls
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer

QUESTION = Question(id="1", text="Which singers?", database="")
NOBODY = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
BEDROCK = "bedrock-runtime.eu-west-1.amazonaws.com"
BODY = {"inputText": "Which singers?"}


def own_socket() -> None:
    socket.create_connection((BEDROCK, 443), timeout=5).close()


def connects_by_name() -> None:
    with socket.socket() as connection:
        connection.connect((BEDROCK, 443))


def urllib_post() -> None:
    urllib.request.urlopen(f"https://{BEDROCK}/model/x/invoke", data=b"{}", timeout=5).close()


def requests_post() -> None:
    requests.post(f"https://{BEDROCK}/model/x/invoke", json=BODY, timeout=5)


def httpx_post() -> None:
    httpx.post(f"https://{BEDROCK}/model/x/invoke", json=BODY, timeout=5)


async def asyncio_streams() -> None:
    await asyncio.open_connection(BEDROCK, 443, ssl=True)


async def aiohttp_post() -> None:
    async with aiohttp.ClientSession() as session, session.post(f"https://{BEDROCK}/model/x/invoke", json=BODY):
        pass


async def httpx_async() -> None:
    async with httpx.AsyncClient() as client:
        await client.post(f"https://{BEDROCK}/model/x/invoke", json=BODY)


async def embeddings() -> None:
    async with openai.AsyncOpenAI(
        api_key="sk-of-the-author", base_url=f"https://{BEDROCK}/v1", max_retries=0
    ) as client:
        await client.embeddings.create(model="e", input="x")


def in_a_pool() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(own_socket).result()


WAYS = (own_socket, connects_by_name, urllib_post, requests_post, httpx_post, in_a_pool)
ASYNC_WAYS = (asyncio_streams, aiohttp_post, httpx_async, embeddings)


def _agent(way: Callable[[], Any], *, swallows: bool) -> Any:
    async def asynchronous(question: str) -> str:
        with suppress(*[Exception] * swallows):
            await way()
        return "fine"

    def synchronous(question: str) -> str:
        with suppress(*[Exception] * swallows):
            way()
        return "fine"

    return asynchronous if way in ASYNC_WAYS else synchronous


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("way", [*WAYS, *ASYNC_WAYS])
async def test_a_call_to_a_provider_is_refused_and_the_failure_names_its_host(way: Any, swallows: bool) -> None:
    with pytest.raises(AgentSetupError, match=f"call to {BEDROCK} was refused.* or give --train-model") as raised:
        await agent_backend(_agent(way, swallows=swallows)).run(QUESTION, NOBODY)
    assert str(raised.value).count("refused") == 1


async def test_train_model_sends_calls_of_other_models_to_their_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[Any] = []

    def no_network(host: Any, *_: Any, **__: Any) -> Any:
        looked_up.append(host)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    for way in (own_socket, httpx_post):
        with pytest.raises(BackendError, match="no network"):
            await agent_backend(_agent(way, swallows=False), train_model="trained").run(QUESTION, NOBODY)
    assert looked_up == [BEDROCK, BEDROCK]


async def test_a_call_behind_an_http_proxy_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_tunnel() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", 9, timeout=5)
        connection.set_tunnel(BEDROCK, 443)
        connection.request("POST", "/model/x/invoke", "{}")

    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    for way in (with_tunnel, requests_post, httpx_post, httpx_async):
        with pytest.raises(AgentSetupError, match=BEDROCK):
            await agent_backend(_agent(way, swallows=False)).run(QUESTION, NOBODY)


async def test_with_traced_calls_a_refused_one_is_a_tools_failure_whose_host_the_policy_may_have_made_up() -> None:
    async def agent(question: str, *, swallows: bool) -> str:
        async with openai.AsyncOpenAI(api_key="none") as client:
            messages: Any = [{"role": "user", "content": question}]
            reply = await client.chat.completions.create(model="m", messages=messages)
        with suppress(*[Exception] * swallows):
            await httpx_async()
        return str(reply.choices[0].message.content)

    async with ScriptedPolicyServer(replies=["fine"] * 2) as policy:
        endpoint = Endpoint(base_url=policy.base_url, model="m")
        with pytest.raises(ToolError, match=f"call to {BEDROCK} was refused") as raised:
            await agent_backend(lambda question: agent(question, swallows=False)).run(QUESTION, endpoint)
        assert list(raised.value.resources) == [BEDROCK]
        answer = await agent_backend(lambda question: agent(question, swallows=True)).run(QUESTION, endpoint)
    assert answer.text == "fine"


def test_outside_of_rollouts_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    with pytest.raises(OSError, match="getaddrinfo returns an empty list"):
        own_socket()


@pytest.mark.parametrize(
    "host",
    [
        *("api.openai.com", "EU.api.openai.com.", "api.openai.com:443", "me.openai.azure.com", "api.anthropic.com"),
        *("generativelanguage.googleapis.com", "us-central1-aiplatform.googleapis.com", "api.groq.com"),
        *("bedrock-runtime-fips.us-gov-west-1.amazonaws.com", "bedrock-runtime.cn-north-1.amazonaws.com.cn"),
        *("api.mistral.ai", "api.cohere.com", "api.together.xyz", "openrouter.ai", "api.deepseek.com", "api.x.ai"),
        *("api.fireworks.ai", "router.huggingface.co", "api.perplexity.ai", "api.cerebras.ai"),
        *("integrate.api.nvidia.com", "dashscope.aliyuncs.com", "dashscope-intl.aliyuncs.com"),
    ],
)
def test_these_are_providers(host: str) -> None:
    assert is_provider(host)


@pytest.mark.parametrize(
    "host",
    [
        *("huggingface.co", "s3.eu-west-1.amazonaws.com", "www.googleapis.com", "platform.openai.com", "127.0.0.1"),
        *("registry.ollama.ai", "notopenrouter.ai", "api.openai.com.example.org", "", "localhost"),
    ],
)
def test_these_are_none(host: str) -> None:
    assert not is_provider(host)


def test_a_body_that_is_a_form_or_a_stream_is_no_call() -> None:
    calls = AttemptCalls(endpoint=NOBODY)
    for body in (iter([b'{"model": "m", "messages": []}']), {"file": object()}, object()):
        assert calls.target("POST", "http://own.example/v1/chat/completions", body) is None
    assert calls.hosts == {"own.example": 3}
