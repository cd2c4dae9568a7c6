"""A cache of replies is off in rollouts, and works outside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import litellm
import pytest
from langchain_core.caches import InMemoryCache
from langchain_openai import ChatOpenAI
from litellm.caching.caching import Cache

from groundwire.adapters import Endpoint, Question, agent_backend
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer

CACHE = InMemoryCache()


def with_langchain(base_url: str) -> str:
    return str(ChatOpenAI(model="m", base_url=base_url, api_key="none", cache=CACHE).invoke("The same").content)


def with_litellm(base_url: str) -> str:
    messages = [{"role": "user", "content": "The same"}]
    options: dict[str, Any] = {"base_url": base_url, "api_key": "none", "caching": True}
    return str(litellm.completion("openai/m", messages, **options).choices[0].message.content)


@pytest.mark.parametrize("ask", [with_langchain, with_litellm])
async def test_a_rollout_never_gets_a_reply_from_a_cache(
    ask: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litellm, "cache", Cache())

    async with ScriptedPolicyServer(["one", "two", "three", "four"]) as server:

        def agent(question: str) -> str:
            return ask("http://127.0.0.1:9/v1")

        import asyncio

        backend = agent_backend(agent)
        endpoint = Endpoint(base_url=server.base_url, model="m")
        answers = [(await backend.run(Question(id=f"{n}", text="", database=""), endpoint)).text for n in range(2)]
        assert answers == ["one", "two"]
        outside = [await asyncio.to_thread(ask, server.base_url) for _ in range(2)]
        assert outside[0] == outside[1], "the author's cache"
