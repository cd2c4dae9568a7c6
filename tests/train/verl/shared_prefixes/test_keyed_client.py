"""verl's client with a load balancer that counts what it is asked."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from groundwire.train.verl.shared_prefixes.routing import KeyedClient


class Remote:
    """An object whose methods are called as those of an actor of Ray, and counted."""

    def __init__(self, target: Any) -> None:
        self.target, self.calls = target, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        async def call(**options: Any) -> Any:
            self.calls[name] += 1
            await asyncio.sleep(0)
            return getattr(self.target, name)(**options)

        return SimpleNamespace(remote=lambda **options: asyncio.ensure_future(call(**options)))


class Server:
    def __init__(self) -> None:
        self.open, self.release = 0, asyncio.Event()

    async def generate(self, **_: Any) -> Any:
        self.open += 1
        await self.release.wait()
        return SimpleNamespace(extra_fields={"global_steps": 1})


def made(servers: int = 2) -> tuple[KeyedClient, Remote, list[Server]]:
    targets = [Server() for _ in range(servers)]
    balancer = Remote(GlobalRequestLoadBalancer({str(i): Remote(each) for i, each in enumerate(targets)}))
    rollout = SimpleNamespace(name="vllm", full_determinism=False)
    config: Any = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    # A server's method is a coroutine, and Ray awaits it.
    for each in balancer.target._servers.values():
        each.__dict__["generate"] = SimpleNamespace(remote=each.target.generate)
    return KeyedClient(LLMServerClient(config, balancer)), balancer, targets


def start(client: KeyedClient, key: str) -> asyncio.Task[Any]:
    return asyncio.ensure_future(client.generate(key, prompt_ids=[1], sampling_params={}))


async def settle() -> None:
    """Let everything run that waits for nothing but its turn."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_calls_with_a_key_share_a_server_that_is_acquired_and_released_once():
    client, balancer, servers = made()
    calls = [start(client, key) for key in "aaaabbbb"]
    await settle()
    assert sorted(server.open for server in servers) == [4, 4]
    assert balancer.calls["acquire_server"] == 2
    assert balancer.target.get_total_inflight() == 2
    for server in servers:
        server.release.set()
    await asyncio.gather(*calls)
    await settle()
    assert balancer.calls["release_server"] == 2
    assert balancer.target.get_total_inflight() == 0
    await start(client, "a")  # the server that has its prompt
    assert sorted(server.open for server in servers) == [4, 5]
    assert balancer.calls["acquire_server"] == 3


async def test_a_cancelled_call_leaves_the_server_to_the_others():
    client, balancer, servers = made(1)
    first, second = start(client, "a"), start(client, "a")
    await asyncio.sleep(0)
    first.cancel()
    await settle()
    assert servers[0].open == 1
    second.cancel()
    await settle()
    assert balancer.target.get_total_inflight() == 0


async def test_a_call_that_is_cancelled_before_it_has_a_server_releases_it():
    client, balancer, _ = made(1)
    call = start(client, "a")
    await asyncio.sleep(0)
    call.cancel()
    await settle()
    assert balancer.calls["acquire_server"] == 1
    assert balancer.target.get_total_inflight() == 0


async def test_without_a_server_each_call_fails_and_the_next_asks_again():
    client, balancer, _ = made(0)
    results = await asyncio.gather(start(client, "a"), start(client, "a"), return_exceptions=True)
    assert [str(error) for error in results] == ["No available servers in load balancer"] * 2
    with pytest.raises(RuntimeError, match="No available servers"):
        await start(client, "a")
    assert balancer.calls["acquire_server"] == 2
