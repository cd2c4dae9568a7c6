"""A store that comes back without a run's rollouts is noticed at once; what has ended stays as it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from external_processes import free_port

from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.tools.http.access_token import access_token
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.store.errors import StoreLostDataError
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.server import bind, serve
from groundwire.train.store.sqlite import MEMORY

TASK = {"id": "t", "question": "?", "query": "SELECT 1", "db_path": ""}


def _jobs() -> list[Rollout]:
    return [Rollout(task=TASK, group="t") for _ in range(3)]


@asynccontextmanager
async def _store(port: int, *, ours: bool) -> AsyncIterator[Any]:
    """An empty store at ``port``."""
    if ours:
        store = LightningStore(MEMORY)
        async with serve(store, bind("127.0.0.1", port), token=access_token()):
            yield store
        return
    server = LightningStoreServer(InMemoryLightningStore(), host="127.0.0.1", port=port, launch_mode="asyncio")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def _collector(port: int) -> AsyncIterator[RolloutCollector]:
    client = RemoteStore(f"http://127.0.0.1:{port}")
    await client.start()
    async with LLMProxy(upstreams=["http://127.0.0.1:9/v1"], sink=client) as proxy:
        yield RolloutCollector(store=client, proxy=proxy, model="m", poll_s=0.05, runner_command="COMMAND")
    await client.stop()


async def _run_rollouts(collector: RolloutCollector) -> None:
    """Ends the three rollouts of a batch."""
    store, ended = collector._store, 0
    while ended < 3:
        for rollout in await store.dequeue(1):
            await store.end_attempt(rollout.rollout_id, rollout.attempts[-1].attempt_id, None, failed=False)
            ended += 1
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("ours", [True, False])
async def test_a_store_that_comes_back_without_the_running_rollouts_ends_the_run_at_once(ours: bool) -> None:
    port = free_port()
    async with AsyncExitStack() as started:
        async with _store(port, ours=ours):
            collector = await started.enter_async_context(_collector(port))
            batch = asyncio.create_task(collector.run(_jobs(), deadline_s=1000))
            while len(await collector._store.unfinished("rs-run")) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with _store(port, ours=ours):
            with pytest.raises(StoreLostDataError, match="does not know 3 of the 3 newest rollouts any more"):
                await asyncio.wait_for(batch, 600)


async def test_a_store_that_comes_back_empty_between_batches_does_not_end_the_run() -> None:
    port = free_port()
    async with AsyncExitStack() as started:
        async with _store(port, ours=True):
            collector = await started.enter_async_context(_collector(port))
            await asyncio.gather(collector.run(_jobs(), deadline_s=30), _run_rollouts(collector))
        async with _store(port, ours=True):
            await asyncio.gather(collector.run(_jobs(), deadline_s=30), _run_rollouts(collector))
            assert await collector._store.get_resources("rs-run") is not None


async def test_a_rollout_that_is_lost_at_its_deadline_is_one_sentence() -> None:
    port = free_port()
    async with _store(port, ours=True) as store, _collector(port) as collector:
        collector._poll_s = 1000
        batch = asyncio.create_task(collector.run(_jobs(), deadline_s=1))
        while len(rollout_ids := await store.unfinished("rs-run")) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for rollout_id in rollout_ids:
            await store.cancel(rollout_id)
        store.prune(keep_s=0)
        with pytest.raises(StoreLostDataError, match="does not know 1 of the 1 newest rollouts any more"):
            await batch
