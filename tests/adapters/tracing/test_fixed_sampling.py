"""Replies are sampled as the trainer wants, whatever an agent asks for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from open_rollouts import OpenRollouts

from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.sampling import derive_seed
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer

HELLO = [{"role": "user", "content": "hello"}]
TRAINERS = {"temperature": 1.0, "seed": 7, "max_tokens": 64}
SENT = ("temperature", "top_p", "seed", "max_tokens", "max_completion_tokens")


@pytest.fixture(params=["in process", "behind HTTP"])
async def ask(request: Any) -> AsyncIterator[Any]:
    """Sends an agent's request in a rollout with given parameters; returns those that the policy got."""
    store, server = OpenRollouts(), ScriptedPolicyServer(lambda _: "x")
    await server.start()
    policy: Any = {"policy": server} if request.param == "in process" else {"upstreams": [server.base_url]}
    proxy = LLMProxy(sink=store, **policy)
    await proxy.start()

    async def send(trainers: Any, *requests: Any, api: str = "chat/completions") -> list[Any]:
        rollout = await store.start(sampling=trainers or {})
        url = proxy.base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        async with aiohttp.ClientSession() as session:
            for body in requests:
                async with session.post(f"{url}/{api}", json={"messages": HELLO, "input": "hello", **body}) as reply:
                    assert reply.status == 200
        sent = server.requests[-len(requests) :]
        return [{name: each[name] for name in SENT if name in each} for each in sent]

    yield send
    await proxy.stop()
    await server.stop()


async def test_the_trainers_values_replace_those_of_the_agent(ask: Any) -> None:
    [sent] = await ask(TRAINERS, {"temperature": 0.7, "top_p": 0.9, "seed": 1, "max_tokens": 500})
    assert sent == {"temperature": 1.0, "top_p": 1.0, "seed": sent["seed"], "max_tokens": 64}
    assert sent["seed"] != 1


async def test_an_agent_without_own_values_gets_the_trainers(ask: Any) -> None:
    [sent] = await ask(TRAINERS, {})
    assert sent == {"temperature": 1.0, "top_p": 1.0, "seed": sent["seed"], "max_tokens": 64}


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
    assert sent == {"temperature": 1.0, "top_p": 1.0, "seed": sent["seed"], name: 64}


@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages", "completions"])
async def test_each_call_of_an_attempt_has_its_own_seed_and_another_rollout_the_same_ones(ask: Any, api: str) -> None:
    base: Any = {"completions": {"prompt": "hello"}, "messages": {"max_tokens": 9}}.get(api, {})
    other = {"messages": [{"role": "user", "content": "other"}], "input": "other"}
    other = {**base, **({"prompt": "other"} if api == "completions" else other)}
    requests = [base, base, other, {**base, "seed": 3}, {**base, "stream": True}]
    seeds = [sent["seed"] for sent in await ask(TRAINERS, *requests, api=api)]
    assert len({*seeds, 7}) == 6
    assert seeds == [sent["seed"] for sent in await ask(TRAINERS, *requests, api=api)]
    assert not {*seeds} & {sent["seed"] for sent in await ask({**TRAINERS, "seed": 8}, *requests, api=api)}


async def test_the_random_ids_of_tool_calls_do_not_change_a_seed(ask: Any) -> None:
    def turn(call_id: str, argument: str) -> Any:
        call = {"id": call_id, "type": "function", "function": {"name": "run", "arguments": argument}}
        answer = {"role": "tool", "tool_call_id": call_id, "content": "2"}
        return {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}, answer]}

    turns = turn("call_a", "{}"), turn("call_b", "{}"), turn("call_a", "[]")
    first, same, another = [(await ask(TRAINERS, each))[0]["seed"] for each in turns]
    assert first == same != another


def test_a_derived_seed_is_an_exact_number_in_json() -> None:
    seeds = {derive_seed(7, n, "\ud800") for n in range(1000)}
    assert len(seeds) == 1000
    assert max(seeds) < 1 << 53


async def test_nothing_changes_without_the_trainers_values(ask: Any) -> None:
    own = {"temperature": 0.7, "top_p": 0.9, "seed": 1, "max_tokens": 500}
    assert await ask(None, own) == [own]


async def test_one_warning_says_what_an_agent_asked_for_and_what_is_used(ask: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        await ask(TRAINERS, {}, {"temperature": 1, "max_tokens": 9999})
        assert not [record for record in caplog.records if record.name.startswith("groundwire")]
        await ask(TRAINERS, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.2})
    [record] = [record for record in caplog.records if record.name.startswith("groundwire")]
    assert record.getMessage() == (
        "an agent asks for temperature=0.7, top_p=0.9; the run samples with temperature=1.0, top_p=1.0, which training "
        "needs, whatever agents ask for"
    )
