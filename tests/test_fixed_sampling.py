"""Replies are sampled as the trainer wants, whatever an agent asks for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from agentlightning.store.memory import InMemoryLightningStore

from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.train.store.spans import LightningSpanSink

HELLO = [{"role": "user", "content": "hello"}]
TRAINERS = {"temperature": 1.0, "seed": 7, "max_tokens": 64}
SENT = ("temperature", "top_p", "seed", "max_tokens", "max_completion_tokens")


@pytest.fixture(params=["in process", "behind HTTP"])
async def ask(request: Any) -> AsyncIterator[Any]:
    """Sends an agent's request in a rollout with given parameters; returns those that the policy got."""
    store, server = InMemoryLightningStore(), ScriptedPolicyServer(lambda _: "x")
    await server.start()
    policy: Any = {"policy": server} if request.param == "in process" else {"upstreams": [server.base_url]}
    proxies: dict[bool, LLMProxy] = {}
    for enforces in (True, False):
        proxies[enforces] = LLMProxy(sink=LightningSpanSink(store), fixed_sampling=enforces, **policy)
        await proxies[enforces].start()

    async def send(trainers: Any, *requests: Any, api: str = "chat/completions", enforces: bool = True) -> list[Any]:
        rollout = await store.start_rollout(input={}, metadata={"sampling": trainers} if trainers else None)
        url = proxies[enforces].base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        async with aiohttp.ClientSession() as session:
            for body in requests:
                async with session.post(f"{url}/{api}", json={"messages": HELLO, "input": "hello", **body}) as reply:
                    assert reply.status == 200
        sent = server.requests[-len(requests) :]
        return [{name: each[name] for name in SENT if name in each} for each in sent]

    yield send
    for proxy in proxies.values():
        await proxy.stop()
    await server.stop()


async def test_the_trainers_values_replace_those_of_the_agent(ask: Any) -> None:
    [sent] = await ask(TRAINERS, {"temperature": 0.7, "top_p": 0.9, "seed": 1, "max_tokens": 500})
    assert sent == {"temperature": 1.0, "top_p": 1.0, "seed": 7, "max_tokens": 64}


async def test_an_agent_without_own_values_gets_the_trainers(ask: Any) -> None:
    assert await ask(TRAINERS, {}) == [{"temperature": 1.0, "top_p": 1.0, "seed": 7, "max_tokens": 64}]


@pytest.mark.parametrize(("own", "sent"), [(10, 10), (100, 64)])
async def test_a_reply_has_at_most_the_trainers_tokens(ask: Any, own: int, sent: int) -> None:
    [got] = await ask({"max_tokens": 64}, {"max_completion_tokens": own, "temperature": 0.3})
    assert got == {"max_completion_tokens": sent, "temperature": 0.3}


async def test_a_top_p_of_the_trainer_is_used(ask: Any) -> None:
    assert await ask({"temperature": 0.5, "top_p": 0.25}, {"top_p": 1}) == [{"temperature": 0.5, "top_p": 0.25}]


@pytest.mark.parametrize(("api", "limit"), [("responses", "max_output_tokens"), ("messages", "max_tokens")])
async def test_the_other_apis_too(ask: Any, api: str, limit: str) -> None:
    [sent] = await ask(TRAINERS, {"temperature": 0.7, limit: 500}, api=api)
    name = "max_completion_tokens" if api == "responses" else "max_tokens"
    assert sent == {"temperature": 1.0, "top_p": 1.0, "seed": 7, name: 64}


async def test_equal_requests_of_an_agent_have_different_seeds_which_the_trainers_own_seed_has_not(ask: Any) -> None:
    other = {"messages": [{"role": "user", "content": "other"}], "input": "other"}
    seeds = [sent["seed"] for sent in await ask(TRAINERS, {}, {}, other, {"seed": 3}, {"seed": 7})]
    assert len(set(seeds)) == 3
    assert (seeds[0], seeds[2], seeds[4]) == (7, 7, 7)
    assert seeds == [sent["seed"] for sent in await ask(TRAINERS, {}, {}, other, {"seed": 3}, {"seed": 7})]


async def test_nothing_changes_without_the_trainers_values_or_if_agents_choose(ask: Any) -> None:
    own = {"temperature": 0.7, "top_p": 0.9, "seed": 1, "max_tokens": 500}
    assert await ask(None, own) == [own]
    assert await ask(TRAINERS, own, enforces=False) == [own]


async def test_one_warning_says_what_an_agent_asked_for_and_what_is_used(ask: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        await ask(TRAINERS, {}, {"temperature": 1, "max_tokens": 9999})
        assert not [record for record in caplog.records if record.name.startswith("groundwire")]
        await ask(TRAINERS, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.2})
    [record] = [record for record in caplog.records if record.name.startswith("groundwire")]
    assert record.getMessage() == (
        "an agent asks for temperature=0.7, top_p=0.9; the run samples with temperature=1.0, top_p=1.0, which training "
        "needs, whatever agents ask for. With fixed_sampling=false agents choose themselves"
    )
