"""A reward that is emitted while the agent works belongs to the call before it."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from decimal import Decimal
from typing import Any

import agentlightning.emitter as agl
import numpy as np
import openai
import pytest
from agentlightning.tracer.base import get_active_tracer
from clients import Clients
from no_data import NoData

from groundwire.adapters import Answer, Backend, Endpoint, Question, agent_backend
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.rewards import JudgeAbstainedError
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.rollouts.runner.agent import RolloutAgent
from groundwire.train.rollouts.runner.pool import RunnerPool
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.rollout import Rollout

Ask = Callable[..., Awaitable[str]]
"""Asks the policy; returns the reply's id."""
Work = Callable[[Ask], Awaitable[None]]


class _SlowStore(MemoryStore):
    """A store far away: the first request is not always served first."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def reserve_sequence_ids(self, attempts: Any) -> Any:
        self.asked += 1
        await asyncio.sleep(0.05 if self.asked % 2 == 0 else 0.0)
        return await super().reserve_sequence_ids(attempts)


class _Agent(Backend):
    """``work`` is what it does; ``ours`` says with whose client."""

    agents = ("solo",)

    def __init__(self, work: Work, *, ours: bool) -> None:
        self.work, self.clients = work, Clients(timeout_s=10) if ours else None

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        own = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0)
        client = self.clients.at(endpoint) if self.clients else own

        async def ask(text: str = question.text) -> str:
            messages: Any = [{"role": "user", "content": text}]
            return (await client.chat.completions.create(model=endpoint.model, messages=messages)).id

        await self.work(ask)
        await own.close()
        return Answer(text="done")

    async def stop(self) -> None:
        if self.clients:
            await self.clients.close()


async def _one(task: Any, answer: str, steps: Any) -> float:
    return 1.0


@asynccontextmanager
async def _collector(agent: Any, reward: Any, *, store: Any) -> AsyncIterator[RolloutCollector]:
    rollouts = RolloutAgent(backend=agent, domain=NoData(), reward=reward, timeout_s=10)
    async with (
        ScriptedPolicyServer(replies=lambda _: "x") as server,
        LLMProxy(upstreams=[server.base_url], sink=store) as proxy,
    ):
        runners = RunnerPool(store=store, agent=rollouts, n_runners=8)
        await runners.start()
        try:
            yield RolloutCollector(
                store=store, proxy=proxy, model=server.model, notify_runners=runners.notify, poll_s=0.05
            )
        finally:
            await runners.stop()
            if isinstance(agent, _Agent):
                await agent.stop()


async def _outcomes(
    work: Work | Any, *, ours: bool = True, reward: Any = _one, n: int = 1, store: Any = None
) -> list[Rollout]:
    """The results of ``n`` rollouts of an agent, or of one that does ``work``."""
    store, agent = store or MemoryStore(), _Agent(work, ours=ours) if callable(work) else work
    async with _collector(agent, reward, store=store) as collector:
        task = {"id": "t", "question": "?"}
        jobs = [Rollout(task=task, group="t") for _ in range(n)]
        return await collector.run(jobs, deadline_s=30)


def _rewards(ended: Rollout) -> list[float | None]:
    assert ended.outcome.reward == 1.0
    assert ended.outcome.status == "succeeded"
    return [call.reward for call in ended.calls]


async def _three_calls(ask: Ask) -> None:
    await ask()
    agl.emit_reward(0.25)
    await ask()
    await ask()
    agl.emit_reward({"syntax": 0.5, "style": 0.125}, primary_key="syntax")


@pytest.mark.parametrize("ours", [True, False])
async def test_an_emitted_reward_reaches_the_triplet_of_the_call_before_it(ours: bool) -> None:
    outcomes = await _outcomes(_three_calls, ours=ours, n=8)
    assert [_rewards(ended) for ended in outcomes] == [[0.25, None, 0.5]] * 8


_RANGE = "it must lie between -1e+15 and 1e+15"


@pytest.mark.parametrize(
    ("reward", "message"),
    [(1e308, _RANGE), (-1e200, _RANGE), (math.inf, _RANGE), (math.nan, _RANGE), (10**300, _RANGE),
     ({"a": 0.5, "b": math.inf}, "it must lie between -1e+30 and 1e+30"), (10**400, _RANGE), (10**5000, _RANGE),
     ({"a": 10**400}, _RANGE), ({"b": 1.0}, "Primary key 'a' not found"), (Decimal(1), "must be a number"),
     (np.float32(1), "must be a number"), ("0.5", "must be a number"), ({"a": "much"}, "must be a number")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@pytest.mark.parametrize("caught", [True, False], ids=["caught", "raised"])
async def test_what_is_emitted_and_no_reward_fails_the_reward_and_scores_nothing(
    reward: Any, message: str, caught: bool
) -> None:
    async def work(ask: Ask) -> None:
        await ask()
        with suppress(Exception if caught else ()):
            agl.emit_reward(reward, primary_key="a" if isinstance(reward, dict) else None)
        await asyncio.sleep(0)

    [ended] = await _outcomes(work, ours=False)
    assert (ended.outcome.status, ended.outcome.reward, len(ended.calls)) == ("reward", None, 1)
    assert message in ended.outcome.message
    assert len(ended.attempts) == 2  # it was tried again, as after any reward that fails


async def test_an_agent_that_emitted_no_reward_is_stopped() -> None:
    stopped = asyncio.Event()

    async def work(ask: Ask) -> None:
        await ask()
        await asyncio.to_thread(agl.emit_reward, math.inf)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    [ended] = await _outcomes(work)
    assert (ended.outcome.status, stopped.is_set()) == ("reward", True)


async def test_a_store_that_is_slow_to_number_a_reward_changes_nothing() -> None:
    [ended] = await _outcomes(_three_calls, store=_SlowStore())
    assert _rewards(ended) == [0.25, None, 0.5]


async def test_a_tool_in_a_thread_may_emit_too() -> None:
    async def work(ask: Ask) -> None:
        await ask()
        await asyncio.to_thread(agl.emit_reward, 0.5)
        await ask()

    [ended] = await _outcomes(work)
    assert _rewards(ended) == [0.5, None]


async def test_a_reward_after_the_last_call_is_that_calls_also_if_it_equals_the_rollouts() -> None:
    async def work(ask: Ask) -> None:
        await ask()
        await ask()
        agl.emit_reward(1.0)

    [ended] = await _outcomes(work)
    assert _rewards(ended) == [None, 1.0]


async def test_parallel_tasks_reward_their_own_calls() -> None:
    async def work(ask: Ask) -> None:
        replied = [asyncio.Event() for _ in range(4)]

        async def branch(number: int) -> None:
            await ask(f"of branch {number}")
            replied[number].set()
            await asyncio.gather(*(each.wait() for each in replied))
            await asyncio.to_thread(agl.emit_reward, number / 8)

        await ask("before")
        await asyncio.gather(*map(branch, range(4)))

    [ended] = await _outcomes(work)
    rewards = {call.messages[0]["content"]: call.reward for call in ended.calls}
    assert rewards == {"before": None} | {f"of branch {number}": number / 8 for number in range(4)}


async def test_an_unmodified_agent_rewards_its_own_calls_too() -> None:
    [ended] = await _outcomes(agent_backend("own_agents:graded"))
    rewards = {call.messages[0]["content"]: call.reward for call in ended.calls}
    assert rewards == {f"branch {number}": number / 4 for number in range(3)}


async def test_a_call_in_a_task_of_its_own_belongs_to_the_task_that_waited_for_it() -> None:
    async def work(ask: Ask) -> None:
        await ask()
        await asyncio.create_task(ask())  # as asyncio.wait_for makes one
        agl.emit_reward(0.5)

    [ended] = await _outcomes(work)
    assert _rewards(ended) == [None, 0.5]


@pytest.mark.parametrize("ours", [True, False])
async def test_a_reward_may_name_the_reply_that_it_is_for(ours: bool) -> None:
    async def work(ask: Ask) -> None:
        replies = [await ask() for _ in range(3)]
        agl.emit_reward(0.25, attributes={"gen_ai.response.id": replies[1]})
        agl.emit_reward(0.5, attributes={"gen_ai.response.id": replies[0]})
        agl.emit_reward(0.75, attributes={"gen_ai.response.id": "chatcmpl-of-another-model"})

    [ended] = await _outcomes(work, ours=ours)
    assert _rewards(ended) == [0.5, 0.25, None]


async def test_emitted_rewards_do_not_replace_a_missing_verdict() -> None:
    async def abstains(task: Any, answer: str, steps: Any) -> float:
        raise JudgeAbstainedError("not today")

    [ended] = await _outcomes(_three_calls, reward=abstains)
    assert (ended.outcome.status, ended.outcome.reward, ended.attempt.number) == ("judge_abstained", None, 1)
    assert [call.reward for call in ended.calls] == [0.25, None, 0.5]


async def test_a_pool_that_stops_leaves_the_other_pools_rollouts_their_tracer() -> None:
    agent = RolloutAgent(backend=_Agent(_three_calls, ours=True), domain=NoData(), reward=_one)
    first, second = (RunnerPool(store=MemoryStore(), agent=agent, n_runners=1) for _ in range(2))
    await first.start()
    await second.start()
    await first.stop()
    assert get_active_tracer() is not None
    await second.stop()
    assert get_active_tracer() is None


async def test_emitting_outside_of_a_rollout_is_refused() -> None:
    async def elsewhere(ask: Ask) -> None:
        await ask()
        tracer = get_active_tracer()
        assert tracer is not None
        emitted.append(tracer)
        contexts.append(copy_context())

    emitted: list[Any] = []
    contexts: list[Any] = []
    await _outcomes(elsewhere)
    for context in (copy_context(), contexts[0]):  # the second is that of a thread that the rollout left
        with pytest.raises(RuntimeError, match="outside of a rollout"):
            context.run(emitted[0].create_span, "annotation")
    assert get_active_tracer() is None


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"groundwire.prompt_token_ids": "AAAA"}, "names that begin with 'groundwire.' are reserved"),
    ],
)
async def test_a_span_that_a_store_would_refuse_is_an_error_of_the_agent(attributes: Any, message: str) -> None:
    async def work(ask: Ask) -> None:
        await ask()
        tracer = get_active_tracer()
        assert tracer is not None
        tracer.create_span("annotation", attributes)

    [ended] = await _outcomes(work, store=MemoryStore())
    assert (ended.outcome.status, ended.outcome.reward) == ("agent", 0.0)
    assert re.search(message, ended.outcome.message)
