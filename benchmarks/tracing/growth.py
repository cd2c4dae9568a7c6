"""How costs grow with the number of calls, rollouts and spans, and with the length of prompts.

A constant cost per call, rollout or token is linear growth. The proxy's memory is read while it handles 100,000 calls.

    python -m benchmarks.tracing.growth [proxy] [rollouts] [spans]
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from functools import cache
from typing import Any

import psutil

from benchmarks._processes import our_store, store_process
from benchmarks._results import median_s, record
from benchmarks.tracing._setup import load, started

CALLS = (1_000, 10_000, 100_000)
ROLLOUTS = (32, 320)
SPANS = (6, 60, 600)
PROMPTS = (1_024, 8_192)


def proxy() -> None:
    """Calls through the proxy into a durable store: calls/s and memory at ten and a hundred times the calls."""
    print(f"{'calls':>10}{'calls/s':>10}{'median ms':>11}{'proxy MB':>10}")
    with (
        tempfile.TemporaryDirectory() as folder,
        store_process(our_store(folder)) as (url, _),
        started("upstream") as upstream,
        started("proxy", "ours", upstream.ready["url"], url) as made,
    ):
        done = 0
        for mark in CALLS:
            part = load(made.ready["urls"], clients=16, seconds=3600.0, at_most=mark - done)
            done = mark
            memory = psutil.Process(made.process.pid).memory_info().rss / 1e6
            print(f"{mark:10,}{part.per_s:10.0f}{part.median_ms:11.2f}{memory:10.0f}", flush=True)
            record(f"proxy after {mark:,} calls: resident memory", memory, unit="MB")
            record(f"proxy after {mark:,} calls: throughput", part.per_s, unit="calls/s")


def rollouts() -> None:
    """Rollouts of three calls with a server that answers at once: the cost of a rollout without the model."""
    print(f"\n{'rollouts':>10}{'ms each':>10}")
    for count in ROLLOUTS:
        each_ms = 1000 * asyncio.run(_run_rollouts(count)) / count
        print(f"{count:10}{each_ms:10.2f}", flush=True)
        record(f"a rollout of three calls without the model, of {count} rollouts", each_ms, unit="ms")


async def _run_rollouts(count: int) -> float:
    from groundwire.adapters import agent_backend
    from groundwire.adapters.tracing.proxy import LLMProxy
    from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
    from groundwire.domains import get
    from groundwire.train.rollouts.collector import RolloutCollector
    from groundwire.train.rollouts.runner.agent import RolloutAgent
    from groundwire.train.rollouts.runner.pool import RunnerPool
    from groundwire.train.store.memory import MemoryStore
    from groundwire.train.store.rollout import Rollout

    domain = get("spider")
    task = domain.load().train[0]

    async def reward(*_: Any) -> float:
        return 1.0

    async with ScriptedPolicyServer(lambda _: "SELECT 1") as server:
        store = MemoryStore()
        agent = RolloutAgent(backend=agent_backend(three_calls), domain=domain, reward=reward)
        async with LLMProxy(upstreams=[server.base_url], sink=store) as tracer:
            pool = RunnerPool(store=store, agent=agent, n_runners=32)
            collector = RolloutCollector(store=store, proxy=tracer, model="policy", notify_runners=pool.notify)
            await pool.start()
            requests = [Rollout(task=task, group=str(number // 8)) for number in range(count)]
            started_s = time.perf_counter()
            results = await collector.run(requests, deadline_s=600)
            seconds = time.perf_counter() - started_s
            assert all(result.succeeded for result in results), results[0].outcome.message
            await pool.stop()
            await _client().close()
            _client.cache_clear()
    return seconds


@cache
def _client() -> Any:
    import openai

    return openai.AsyncOpenAI(api_key="none", max_retries=0, timeout=60, http_client=openai.DefaultAioHttpClient())


async def three_calls(question: Any, endpoint: Any) -> str:
    """An agent that makes three calls of one conversation."""
    messages: list[Any] = [{"role": "user", "content": question.text}]
    for _ in range(3):
        client = _client().with_options(base_url=endpoint.base_url)
        reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        messages.append({"role": "user", "content": "Go on."})
    return str(messages[-2]["content"])


def spans() -> None:
    """Reading the spans of one rollout, by the number of calls and by the length of their prompts."""
    from groundwire.adapters.tracing import calls_from_spans, trajectories

    print(f"\n{'calls':>10}{'prompt':>10}{'ms a call':>11}")
    for calls, tokens in [(count, PROMPTS[0]) for count in SPANS] + [(SPANS[0], PROMPTS[1])]:
        made = [_span(number, tokens) for number in range(calls)]
        ms = median_s(lambda made=made: trajectories(calls_from_spans(made))) * 1000 / calls
        print(f"{calls:10}{tokens:10}{ms:11.3f}", flush=True)
        record(f"spans to trajectories, {calls} calls of {tokens:,} tokens", ms, unit="ms a call")


def _span(number: int, tokens: int) -> Any:
    from groundwire.adapters.tracing.calls import LLMCall, to_span

    return to_span(
        LLMCall(
            rollout_id="r",
            attempt_id="a",
            sequence=number + 1,
            agent="write",
            prompt_ids=list(range(tokens)),
            response_ids=list(range(64)),
            logprobs=[-0.5] * 64,
            finish_reason="stop",
            messages_json=json.dumps([{"role": "user", "content": "x" * 4 * tokens}]),
            reply_json=json.dumps({"role": "assistant", "content": "y" * 256}),
        )
    )


def main() -> None:
    """Print the tables."""
    parts = {"proxy": proxy, "rollouts": rollouts, "spans": spans}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
