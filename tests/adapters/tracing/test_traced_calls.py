"""The proxy records every call of a rollout, however it ends."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from clients import Clients
from no_data import NoData

from groundwire.adapters import Answer, Backend, Endpoint, Question, agent_backend
from groundwire.adapters.conformance import load_backend, play, sampled_ids
from groundwire.adapters.tracing import LLMCall, calls_of_agents, trajectories
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.domains import Task
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.runner.agent import RolloutAgent
from groundwire.train.rollouts.runner.pool import RunnerPool
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Rollout

GOLD = "SELECT name FROM singer"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    path = tmp_path / "db.sqlite"
    with closing(sqlite3.connect(path)) as conn:
        conn.executescript(
            "CREATE TABLE singer (id int, name text); INSERT INTO singer VALUES (1, 'Ann');"
            "CREATE TABLE film (title TEXT, year INT); INSERT INTO film VALUES ('Heat', 1995), ('Alien', 1979);"
        )
    return {"id": "t1", "question": "Which singers?", "query": GOLD, "db_path": str(path)}


def _streaming() -> Any:
    return agent_backend("streamed_sql_agent:streamed")


@pytest.mark.parametrize(
    ("backend", "agent_match", "agents"),
    [
        ("langgraph", "check", ["write_query", "check_query"]),
        ("openai-agents", "sql", ["sql_agent", "sql_agent"]),
        (_streaming, "sql", ["sql_agent", "sql_agent"]),
    ],
)
async def test_triplets_and_trajectories_are_those_of_the_matching_agents(
    backend: Any, agent_match: str, agents: list[str], task: Task
) -> None:
    made = load_backend(backend) if isinstance(backend, str) else backend()
    try:
        recordings = await play(made, str(task["db_path"]), rollouts=5)
    finally:
        await made.stop()
    for recording in recordings:
        assert [call.agent for call in recording.calls] == agents
        assert recording.reward == 1.0
        calls = calls_of_agents(recording.calls, agent_match)
        sampled = [sampled_ids(n) for n, agent in enumerate(agents) if agent_match in agent]
        assert [call.response_ids for call in calls] == sampled
        trained = [
            token
            for trajectory in trajectories(calls)
            for token, mask in zip(trajectory.response_ids, trajectory.loss_mask, strict=True)
            if mask
        ]
        assert sorted(trained) == sorted(token for ids in sampled for token in ids)


class _Backend(Backend):
    """Calls as its function says, over the client that backends share."""

    agents = ("solo",)

    def __init__(self, calls: Callable[[openai.AsyncOpenAI, Endpoint], Awaitable[str]]) -> None:
        self._clients = Clients(timeout_s=20.0)

        async def answer(question: Question, endpoint: Endpoint) -> str:
            return await calls(self._clients.at(endpoint), endpoint)

        self._agent = agent_backend(answer)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        return await self._agent.run(question, endpoint)

    async def stop(self) -> None:
        await self._clients.close()


async def _ask(client: openai.AsyncOpenAI, endpoint: Endpoint, **options: Any) -> Any:
    return await client.chat.completions.create(
        model="whatever the author wrote",
        messages=[{"role": "user", "content": "Which?"}],
        extra_headers=endpoint.agent_headers("solo"),
        **{**endpoint.sampling, **options},
    )


async def _once(client: openai.AsyncOpenAI, endpoint: Endpoint) -> str:
    return (await _ask(client, endpoint)).choices[0].message.content


@asynccontextmanager
async def _collector(policy_url: str, backend: Any, *, timeout_s: float) -> AsyncIterator[RolloutCollector]:
    async def exact(task: Any, answer: str, steps: Any) -> float:
        return float(answer == task["query"])

    store = MemoryStore()
    agent = RolloutAgent(backend=backend, domain=NoData(), reward=exact, timeout_s=timeout_s)
    proxy = LLMProxy(upstreams=[policy_url], sink=store, model="scripted")
    await proxy.start()
    runners = RunnerPool(store=store, agent=agent, n_runners=8)
    collector = RolloutCollector(store=store, proxy=proxy, model="scripted", retries=0, notify_runners=runners.notify)
    await runners.start()
    try:
        yield collector
    finally:
        await runners.stop()
        await proxy.stop()
        if isinstance(backend, _Backend):
            await backend.stop()


async def _run(
    task: Task, policy_url: str, backend: Any, *, count: int = 1, timeout_s: float = 15.0
) -> list[tuple[Rollout, list[LLMCall]]]:
    """Each rollout and all its calls, failed ones too."""
    jobs = [Rollout(task=task, group="t1", sampling={"temperature": n}) for n in range(count)]
    async with _collector(policy_url, backend, timeout_s=timeout_s) as collector:
        outcomes = await collector.run(jobs, deadline_s=20)
        return [(ended, ended.calls) for ended in outcomes]


async def _outcomes(task: Task, replies: Any, calls: Any, **options: Any) -> list[tuple[Rollout, list[LLMCall]]]:
    async with ScriptedPolicyServer(replies=replies) as server:
        return await _run(task, server.base_url, _Backend(calls) if callable(calls) else calls, **options)


async def test_concurrent_rollouts_have_their_own_calls(task: Task) -> None:
    async def twice(client: openai.AsyncOpenAI, endpoint: Endpoint) -> str:
        replies = await asyncio.gather(*(asyncio.create_task(_once(client, endpoint)) for _ in range(2)))
        return replies[0]

    def reply(body: dict[str, Any]) -> Reply:
        return Reply(text=GOLD, token_ids=[body["temperature"]], weights_version=3, delay_s=0.05)

    outcomes = await _outcomes(task, reply, twice, count=8)
    assert [[call.response_ids for call in calls] for _, calls in outcomes] == [[[n], [n]] for n in range(8)]
    assert [ended.outcome.reward for ended, _ in outcomes] == [1.0] * 8
    assert {call.weights_version for _, calls in outcomes for call in calls} == {3}


async def _reads_half(client: openai.AsyncOpenAI, endpoint: Endpoint) -> str:
    async with await _ask(client, endpoint, stream=True) as stream:
        async for _ in stream:
            return GOLD
    return ""


async def _reads_it_all(client: openai.AsyncOpenAI, endpoint: Endpoint) -> str:
    stream = await _ask(client, endpoint, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def _none(client: openai.AsyncOpenAI, endpoint: Endpoint) -> str:
    await _ask(client, endpoint, n=0)
    return ""


@pytest.mark.parametrize(
    ("reply", "calls", "outcome", "recorded"),
    [
        (GOLD, _once, "succeeded", (200, "")),
        (GOLD, _reads_it_all, "succeeded", (200, "")),
        (Reply(text=GOLD, delay_s=0.2), _reads_half, "succeeded", (200, "")),
        (Reply(status=503, text="out of cards"), _once, "endpoint", (503, "out of cards")),
        (Reply(status=400, text="long", code="context_length_exceeded"), _once, "prompt_too_long", (400, "long")),
        (Reply(text=GOLD, breaks_off=True), _reads_it_all, "endpoint", (200, "the policy server broke off its")),
        (Reply(text=GOLD, delay_s=30), _once, "timeout", (499, "the client left before the reply was complete")),
        (GOLD, _none, "endpoint", (400, "n must be a number from 1 to 128, not 0")),
    ],
)
async def test_a_call_is_recorded_however_it_ends(
    task: Task, reply: Any, calls: Any, outcome: str, recorded: tuple[int, str]
) -> None:
    timeout_s = 0.5 if outcome == "timeout" else 15.0
    [(result, [call])] = await _outcomes(task, lambda _: reply, calls, timeout_s=timeout_s)
    assert result.outcome.status == outcome, result.outcome.message
    assert (call.status, call.error[: len(recorded[1])]) == recorded
    assert call.agent == "solo"


async def test_a_call_to_an_unreachable_model_is_recorded(task: Task) -> None:
    [(ended, [call])] = await _run(task, "http://127.0.0.1:9/v1", _Backend(_once))
    assert ended.outcome.status == "endpoint"
    assert call.status == 502
    assert call.error.startswith("the policy server at http://127.0.0.1:9/v1")


async def test_an_agent_with_its_own_client_is_traced(task: Task) -> None:
    class Own:
        agents = ("solo",)

        async def run(self, question: Question, endpoint: Endpoint) -> Answer:
            async with httpx.AsyncClient(trust_env=False) as client:
                body = {"model": endpoint.model, "messages": [{"role": "user", "content": question.text}]}
                reply = await client.post(f"{endpoint.base_url}/chat/completions", json=body)
            return Answer(text=reply.json()["choices"][0]["message"]["content"])

    [(ended, [call])] = await _outcomes(task, lambda _: GOLD, Own())
    assert (ended.outcome.status, ended.outcome.reward, call.untrainable_reason) == ("succeeded", 1.0, "")


async def test_apis_that_sample_nothing_are_refused(task: Task) -> None:
    async def embeds(client: openai.AsyncOpenAI, endpoint: Endpoint) -> str:
        return str(await client.embeddings.create(model="m", input="x"))

    [(ended, _)] = await _outcomes(task, lambda _: GOLD, embeds)
    assert (ended.outcome.status, ended.outcome.reward) == ("endpoint", None)
    assert "/v1/embeddings is not traced: the policy only writes text; ask an embedding model" in ended.outcome.message
