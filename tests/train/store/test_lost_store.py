"""A store that comes back without a run's rollouts is noticed at once; what has ended stays as it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, RolloutConfig, Span, SpanCoreFields, TraceStatus
from external_processes import free_port
from typer.testing import CliRunner

from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.tools.http.access_token import access_token
from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.store.__main__ import app
from groundwire.train.store.backends.base import MemoryStore
from groundwire.train.store.backends.sqlite import MEMORY, SqliteLightningStore
from groundwire.train.store.client import StoreClient
from groundwire.train.store.errors import StoreLostDataError
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.server import bind, serve
from groundwire.train.store.spans import LightningSpanSink

TASK = {"id": "t", "question": "?", "query": "SELECT 1", "db_path": ""}


def _jobs() -> list[Rollout]:
    return [Rollout(task=TASK, group="t") for _ in range(3)]


def _span(attempted: AttemptedRollout) -> Span:
    status = TraceStatus(status_code="OK")
    fields = SpanCoreFields(name="call", attributes={}, status=status, start_time=1.0, end_time=2.0)
    ids = {"rollout_id": attempted.rollout_id, "attempt_id": attempted.attempt.attempt_id}
    return Span.from_core_fields(fields, sequence_id=1, **ids)


@asynccontextmanager
async def _store(port: int, *, ours: bool) -> AsyncIterator[LightningStore]:
    """An empty store at ``port``."""
    if ours:
        store = SqliteLightningStore(MEMORY)
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
    client = StoreClient(f"http://127.0.0.1:{port}")
    await client.start()
    async with LLMProxy(upstreams=["http://127.0.0.1:9/v1"], sink=LightningSpanSink(client)) as proxy:
        yield RolloutCollector(store=client, proxy=proxy, model="m", poll_s=0.05, runner_command="COMMAND")
    await client.stop()


async def _run_rollouts(store: LightningStore) -> None:
    """Ends the three rollouts of a batch."""
    ended = 0
    while ended < 3:
        if rollout := await store.dequeue_rollout():
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
            ended += 1
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("ours", [True, False])
async def test_a_store_that_comes_back_without_the_running_rollouts_ends_the_run_at_once(ours: bool) -> None:
    port = free_port()
    async with AsyncExitStack() as started:
        async with _store(port, ours=ours) as store:
            collector = await started.enter_async_context(_collector(port))
            batch = asyncio.create_task(collector.run(_jobs(), deadline_s=1000))
            while len(await store.query_rollouts()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with _store(port, ours=ours):
            with pytest.raises(StoreLostDataError, match="does not know 3 of the 3 newest rollouts any more"):
                await asyncio.wait_for(batch, 30)


async def test_a_store_that_comes_back_empty_between_batches_does_not_end_the_run() -> None:
    port = free_port()
    async with AsyncExitStack() as started:
        async with _store(port, ours=True) as store:
            collector = await started.enter_async_context(_collector(port))
            await asyncio.gather(collector.run(_jobs(), deadline_s=30), _run_rollouts(store))
        async with _store(port, ours=True) as store:
            await asyncio.gather(collector.run(_jobs(), deadline_s=30), _run_rollouts(store))
            assert await store.get_resources_by_id("rs-run") is not None


async def test_a_store_that_loses_the_address_of_the_proxy_gets_it_again() -> None:
    port = free_port()
    async with AsyncExitStack() as started:
        async with _store(port, ours=True) as store:
            collector = await started.enter_async_context(_collector(port))
            await asyncio.gather(collector.run(_jobs(), deadline_s=30), _run_rollouts(store))
        async with _store(port, ours=True) as store:
            collector._newest = ""  # the store was emptied after the batch's first look
            await asyncio.gather(collector.run(_jobs(), deadline_s=30), _run_rollouts(store))
            assert await store.get_resources_by_id("rs-run") is not None


async def test_a_rollout_that_is_lost_at_its_deadline_is_one_sentence() -> None:
    port = free_port()
    async with _store(port, ours=True) as store, _collector(port) as collector:
        collector._poll_s = 1000
        batch = asyncio.create_task(collector.run(_jobs(), deadline_s=1))
        while len(await store.query_rollouts()) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for rollout in await store.query_rollouts():
            await store.update_rollout(rollout.rollout_id, status="cancelled")
        store.prune(keep_s=0)  # type: ignore[attr-defined]
        with pytest.raises(StoreLostDataError, match="does not know 1 of the 1 newest rollouts any more"):
            await batch


@pytest.mark.parametrize("store", [MemoryStore(), SqliteLightningStore(MEMORY)])
async def test_a_rollout_that_has_ended_stays_as_it_ended(store: LightningStore) -> None:
    retried = RolloutConfig(max_attempts=2, retry_condition=["failed"])

    async def status(rollout_id: str) -> Any:
        rollout = await store.get_rollout_by_id(rollout_id)
        assert rollout is not None
        return rollout.status

    succeeded, cancelled, failed = [await store.start_rollout({}, config=retried) for _ in range(3)]
    await store.update_attempt(succeeded.rollout_id, "latest", status="succeeded")
    ended = await store.get_rollout_by_id(succeeded.rollout_id)
    assert (await store.update_rollout(succeeded.rollout_id, status="cancelled")).status == "succeeded"
    assert await store.get_rollout_by_id(succeeded.rollout_id) == ended

    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    await store.update_attempt(cancelled.rollout_id, "latest", status="failed")
    assert await status(cancelled.rollout_id) == "cancelled"
    assert await store.dequeue_rollout() is None

    await store.update_rollout(failed.rollout_id, status="failed")
    await store.update_rollout(failed.rollout_id, status="cancelled", metadata={"kept": True})
    assert await status(failed.rollout_id) == "failed"

    for rollout in (succeeded, cancelled, failed):  # a new start is deliberate
        await store.update_rollout(rollout.rollout_id, status="queuing")
        again = await store.dequeue_rollout()
        assert again is not None
        assert (again.rollout_id, again.status, again.attempt.sequence_id) == (rollout.rollout_id, "preparing", 2)


async def test_rollouts_that_ended_long_ago_are_pruned_with_all_their_data(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    for number in range(120):
        attempted = await store.start_rollout({"n": number})
        await store.add_span(_span(attempted))
        if number < 110:
            await store.update_attempt(attempted.rollout_id, "latest", status="succeeded")
    queued = await store.enqueue_rollout({})
    await store.update_rollout(queued.rollout_id, status="cancelled")
    assert store.prune(keep_s=100) == 0
    deleted = 0
    while part := store.prune(keep_s=0):
        deleted += part
    assert deleted == 111
    assert [rollout.input["n"] for rollout in await store.query_rollouts()] == list(range(110, 120))
    assert await store.query_spans(attempted.rollout_id) != []
    statistics = await store.statistics()
    assert (statistics["total_rollouts"], statistics["total_spans"], statistics["total_attempts"]) == (10, 10, 10)
    assert await store.collections.rollout_queue.size() == 0
    assert await store.collections.span_sequence_ids.size() == 10
    store.close()


@pytest.mark.parametrize("keep", ["0", "nan", "-1"])
def test_the_store_keeps_rollouts_for_a_while(keep: str) -> None:
    assert "--keep" in CliRunner().invoke(app, ["--memory", "--keep", keep]).output
