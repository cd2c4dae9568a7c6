"""A rollout's agent of a proxy with a scripted policy, in its process or behind HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from open_rollouts import OpenRollouts

from groundwire.adapters.tracing import LLMCall, Trajectory, trajectories
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import END, ScriptedPolicyServer, encode, render
from groundwire.tools.http.access_token import access_token
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.server import PolicyServer

ARGUMENTS = '{"sql": "SELECT 1"}'
PARAMETERS = {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "run", "description": "Run it", "parameters": PARAMETERS}}
CALL: Any = {"id": "call-1", "type": "function", "function": {"name": "run", "arguments": ARGUMENTS}}
OTHER_CALL: Any = {**CALL, "id": "call-2"}


class Bench:
    """One rollout; ``url`` ends in ``/v1``, ``root`` does not."""

    def __init__(self, server: ScriptedPolicyServer, proxy: LLMProxy, store: Any, rollout: Any) -> None:
        self.server, self.proxy, self.store, self.rollout_id = server, proxy, store, rollout.rollout_id
        self.url = proxy.base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        self.root = self.url.removesuffix("/v1")

    async def calls(self) -> list[LLMCall]:
        await self.proxy.flush()
        return await self.store.calls(self.rollout_id)

    async def trajectories(self) -> list[Trajectory]:
        return trajectories(await self.calls())

    async def check_call(self, messages: list[Any], text: str, **asked: Any) -> LLMCall:
        """The only call: it has ``messages``, was answered with ``text``, and the policy was ``asked`` for it so."""
        [call] = await self.calls()
        assert (call.prompt_ids, call.response_ids) == (render(messages), [*encode(text), END])
        assert (call.messages, call.reply["content"], call.untrainable_reason) == (messages, text, "")
        [request] = self.server.requests
        assert {name: request[name] for name in asked} == asked
        return call

    async def check_turns(self) -> list[LLMCall]:
        """The calls with :data:`CHAT_TOOL`: all of their sampled tokens are trained, as one trajectory."""
        calls = await self.calls()
        assert all(call.tools == [CHAT_TOOL] for call in calls)
        [trajectory] = await self.trajectories()
        assert sum(trajectory.loss_mask) == sum(len(call.response_ids) for call in calls)
        return calls


@pytest.fixture(params=["in process", "behind HTTP"])
async def bench(request: Any) -> AsyncIterator[Any]:
    """Makes benches from replies, and closes them."""
    closing: list[Any] = []

    async def make(*replies: Any) -> Bench:
        store, server = OpenRollouts(), ScriptedPolicyServer(replies)
        await server.start()
        policy: Any = {"policy": server} if request.param == "in process" else {"upstreams": [server.base_url]}
        proxy = LLMProxy(sink=store, **policy)
        await proxy.start()
        closing.extend([proxy.stop, server.stop])
        return Bench(server, proxy, store, await store.start())

    yield make
    for close in closing:
        await close()


@pytest.fixture(params=["in process", "behind HTTP"])
async def policy(request: Any, tiny_policy: Any) -> AsyncIterator[Any]:
    """A bench with a small random model, its ``engine`` and ``tokenizer``."""
    engine = LocalEngine(*tiny_policy, max_model_len=400)
    store, server = OpenRollouts(), PolicyServer(engine)
    await server.start()
    options: dict[str, Any] = {"policy": server}
    if request.param == "behind HTTP":
        options = {"upstreams": [f"{server.url}/v1"], "model": "policy", "api_key": access_token()}
    async with LLMProxy(sink=store, **options) as proxy:
        b: Any = Bench(server, proxy, store, await store.start())  # type: ignore[arg-type]
        b.engine, b.tokenizer = engine, engine.tokenizer
        yield b
    await server.stop()
    engine.close()
