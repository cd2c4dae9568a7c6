"""What a runner does with an agent that traces without end, and with a rollout that it cannot run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import agentlightning.emitter as agl
import httpx
import pytest
from no_data import NoData

from groundwire.adapters import Answer, Backend, Endpoint, Question, agent_backend
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.adapters.tracing.spans import TraceLimit
from groundwire.train.config.run_config import RunConfig
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.runner.agent import RolloutAgent
from groundwire.train.rollouts.runner.pool import RunnerPool
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.store.sqlite import MEMORY


async def _one(task: Any, answer: str, steps: Any) -> float:
    return 1.0


@asynccontextmanager
async def _runs(backend: Backend, store: Any, **options: Any) -> AsyncIterator[RolloutCollector]:
    agent = RolloutAgent(backend=backend, domain=NoData(), reward=_one, timeout_s=60)
    async with (
        ScriptedPolicyServer(replies=lambda _: "x") as server,
        LLMProxy(upstreams=[server.base_url], sink=store) as proxy,
    ):
        runners = RunnerPool(store=store, agent=agent, n_runners=8)
        await runners.start()
        try:
            notify = runners.notify
            yield RolloutCollector(store=store, proxy=proxy, model="m", notify_runners=notify, poll_s=0.05, **options)
        finally:
            await runners.stop()
            await backend.stop()


def _rollouts() -> list[Rollout]:
    return [Rollout(task={"id": name, "question": name}, group=name) for name in ("endless", "short")]


def _emits(task: str) -> str:
    """Code of a user, in a thread, that catches everything."""
    while task == "endless":
        try:
            agl.emit_annotation({"note": "again"})
        except Exception:
            return "caught"
    agl.emit_annotation({"note": "once"})
    return "4"


class _Calls(Backend):
    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        async with httpx.AsyncClient(base_url=endpoint.base_url) as client:
            while True:
                body = {"model": "m", "messages": [{"role": "user", "content": "again"}]}
                reply = await client.post("chat/completions", json=body)
                if question.id == "short" or reply.status_code != httpx.codes.OK:
                    return Answer(text=str(reply.status_code))


@pytest.mark.parametrize("make", [MemoryStore, lambda: LightningStore(MEMORY)], ids=["memory", "sqlite"])
@pytest.mark.parametrize("backend", [lambda: agent_backend(_emits), _Calls], ids=["emitting", "calling"])
async def test_an_agent_that_traces_without_end_fails_and_the_run_goes_on(backend: Any, make: Any) -> None:
    async with _runs(backend(), make(), trace_limit=TraceLimit(spans=40)) as collector:
        endless, short = await collector.run(_rollouts(), deadline_s=120)
        assert (endless.outcome.status, endless.outcome.reward) == ("trace_limit", 0.0)  # as other failures of a policy
        assert "more LLM calls and emitted spans than max_spans, 40" in endless.outcome.message
        assert (len(endless.calls) + len(endless.annotations), len(endless.attempts)) == (40, 1)
        assert (short.outcome.status, short.outcome.reward) == ("succeeded", 1.0)
        [_, again] = await collector.run(_rollouts(), deadline_s=120)
        assert again.outcome.reward == 1.0


async def test_the_failure_is_tried_again_if_it_has_no_score() -> None:
    agent = agent_backend(_emits)
    limit = TraceLimit(spans=40, retry=True)
    async with _runs(agent, MemoryStore(), trace_limit=limit) as collector:
        [endless, _] = await collector.run(_rollouts(), deadline_s=120)
    assert (endless.outcome.status, len(endless.attempts)) == ("trace_limit", 2)


def test_the_limit_of_a_run_is_that_of_other_clients_of_its_store() -> None:
    assert RunConfig().max_spans == TraceLimit().spans


async def _ended(store: Any, resources_id: str) -> Outcome:
    """How a rollout that another client enqueued ends; a runner of this process takes it."""
    agent = RolloutAgent(backend=_Calls(), domain=NoData(), reward=_one, timeout_s=60)
    runners = RunnerPool(store=store, agent=agent, n_runners=1)
    ended = asyncio.Event()
    store.on_attempt_end = lambda _: ended.set()
    rollout = Rollout(task={"id": "t", "question": "?"}, resources_id=resources_id)
    await store.enqueue([rollout])
    await runners.start()
    await asyncio.wait_for(ended.wait(), 600)
    await runners.stop()
    read = await store.get(rollout.rollout_id)
    assert read.status == "failed"
    return read.outcome


@pytest.mark.parametrize("make", [MemoryStore, lambda: LightningStore(MEMORY)], ids=["memory", "sqlite"])
async def test_a_rollout_whose_resources_do_not_exist_fails_and_says_so(make: Any) -> None:
    outcome = await _ended(make(), "rs-gone")
    assert (outcome.failure, outcome.reward) == ("refused", None)
    assert outcome.message == "the store has no resources 'rs-gone': store them before the rollouts that name them"


async def test_a_rollout_whose_resources_cannot_be_read_fails_and_says_so() -> None:
    store = LightningStore(MEMORY)
    await store.update_resources("rs-odd", {"policy": {"resource_type": "proxy_llm", "endpoint": 7}})
    outcome = await _ended(store, "rs-odd")
    assert outcome.failure == "refused"
    assert "the resources 'rs-odd' in the store cannot be read: " in outcome.message


async def test_a_rollout_whose_resources_have_no_policy_fails_and_says_so() -> None:
    store = MemoryStore()
    await store.put_resources("rs-empty", {"prompt": {"resource_type": "prompt_template"}})
    outcome = await _ended(store, "rs-empty")
    assert outcome.failure == "refused"
    assert "no 'policy' of the type proxy_llm" in outcome.message
