"""The SQLite store behaves like Agent Lightning's own, loses nothing, and works with all its clients."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pydantic_core
import pytest
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    ProxyLLM,
    Rollout,
    RolloutConfig,
    Span,
    SpanCoreFields,
    TraceStatus,
)
from aiohttp import web
from mongo_wire import FakeMongo, fake_mongo
from programs import Program

from groundwire.tools.errors import CommandError
from groundwire.tools.http.access_token import access_token
from groundwire.tools.http.server import make_runner
from groundwire.train.store.__main__ import _open_store
from groundwire.train.store.backends.base import MemoryStore
from groundwire.train.store.backends.sqlite import MEMORY, SqliteLightningStore
from groundwire.train.store.client import StoreClient
from groundwire.train.store.errors import MongoStoreError, StoreFileError, StoreGoneError
from groundwire.train.store.health import check_store
from groundwire.train.store.server import application


def _span(attempted: AttemptedRollout, sequence: int, name: str = "call", **attributes: Any) -> Span:
    status = TraceStatus(status_code="OK")
    fields = SpanCoreFields(name=name, attributes=attributes, status=status, start_time=1.0, end_time=2.0)
    ids = {"rollout_id": attempted.rollout_id, "attempt_id": attempted.attempt.attempt_id}
    return Span.from_core_fields(fields, sequence_id=sequence, **ids)


async def _taken(store: LightningStore, worker: str = "w") -> AttemptedRollout:
    attempted = await store.dequeue_rollout(worker)
    assert attempted is not None
    return attempted


@asynccontextmanager
async def _served(store: LightningStore, *middlewares: Any) -> AsyncIterator[str]:
    app = application(store, access_token())
    app.middlewares.extend(middlewares)
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _with_token(url: str) -> str:
    """For clients that know nothing of the token."""
    return url.replace("://", f"://x:{access_token()}@")


@asynccontextmanager
async def _their_server(store: LightningStore) -> AsyncIterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = LightningStoreServer(store, host="127.0.0.1", port=port, launch_mode="asyncio")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop()


@asynccontextmanager
async def _mongo(server: FakeMongo) -> AsyncIterator[LightningStore]:
    from groundwire.train.store.backends.mongo import MongoStore

    async with fake_mongo(server) as uri:
        store = await asyncio.to_thread(MongoStore, uri)  # it asks the server, which is on this loop
        yield store
        await store.close()


@asynccontextmanager
async def _store(kind: str, tmp_path: Path) -> AsyncIterator[LightningStore]:
    """A store in this process, or behind a pair of server and client."""
    if kind == "theirs":
        yield InMemoryLightningStore()
        return
    if kind == "our client, their server":
        async with _their_server(InMemoryLightningStore()) as url:
            client = StoreClient(url)
            await client.start()
            yield client
            await client.stop()
        return
    if kind == "MongoDB":
        pytest.importorskip("pymongo")
        async with _mongo(FakeMongo()) as store:
            yield store
        return
    store = SqliteLightningStore(tmp_path / "store.db")
    if kind == "ours":
        yield store
    else:
        async with _served(store) as url:
            client = StoreClient(url) if kind == "our client, our server" else LightningStoreClient(_with_token(url))
            if isinstance(client, StoreClient):
                await client.start()
            yield client
            await client.close()
    store.close()


KINDS = ("theirs", "ours", "MongoDB", "their client, our server", "our client, our server", "our client, their server")


async def test_a_store_reads_a_policys_address_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with _store("our client, our server", tmp_path) as store:
        await store.update_resources("named", {"policy": ProxyLLM(endpoint="http://a/v1", model="m")})
        assert await store.get_resources_by_id("named") is not None
    assert not caplog.records


@pytest.mark.parametrize("kind", KINDS)
async def test_all_stores_behave_alike(kind: str, tmp_path: Path) -> None:
    async with _store(kind, tmp_path) as store:
        resources = await store.add_resources({"policy": ProxyLLM(endpoint="http://a/v1", model="m")})
        await store.update_resources("rs-named", {"policy": ProxyLLM(endpoint="http://b/v1", model="m")})
        latest = await store.get_latest_resources()
        assert latest is not None
        assert (latest.resources_id, latest.version) == ("rs-named", 1)
        assert [one.resources_id for one in await store.query_resources()] == [resources.resources_id, "rs-named"]
        config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
        first = await store.enqueue_rollout({"n": 0}, mode="train", config=config, metadata={"group": "g"})
        more = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"n": n}) for n in (1, 2)])
        assert (first.status, first.resources_id) == ("queuing", "rs-named")

        attempted = await _taken(store)
        assert (attempted.input, attempted.status, attempted.mode) == ({"n": 0}, "preparing", "train")
        pair = (attempted.rollout_id, attempted.attempt.attempt_id)
        assert list(await store.get_many_span_sequence_ids([pair, pair])) == [1, 2]
        assert await store.get_next_span_sequence_id(*pair) == 3
        spans = [_span(attempted, 2, "b", text="x" * 10), _span(attempted, 1, "a", ids=[1, 2])]
        assert len(await store.add_many_spans(spans)) == 2
        assert await store.add_span(_span(attempted, 7, "late")) is not None
        assert list(await store.add_many_spans(spans[:1])) == []
        assert await store.get_next_span_sequence_id(*pair) == 8
        found = await store.query_spans(pair[0], "latest")
        assert [(span.name, span.sequence_id) for span in found] == [("a", 1), ("b", 2), ("late", 7)]
        assert found[0].attributes == {"ids": [1, 2]}
        assert [s.name for s in await store.query_spans(pair[0], name="a", name_contains="l", filter_logic="or")] == [
            "a",
            "late",
        ]
        page = await store.query_spans(pair[0], sort_by="name", sort_order="desc", limit=1, offset=1)
        assert ([span.name for span in page], page.total) == (["b"], 3)
        running = await store.get_rollout_by_id(pair[0])
        assert running is not None
        assert running.status == "running"

        await store.update_attempt(*pair, status="failed")
        assert [r.status for r in await store.query_rollouts(rollout_id_in=[pair[0]])] == ["requeuing"]
        assert [(await _taken(store)).input for _ in range(3)] == [{"n": 1}, {"n": 2}, {"n": 0}]
        assert await store.dequeue_rollout("idle") is None
        assert [a.status for a in await store.query_attempts(pair[0])] == ["failed", "preparing"]
        await store.update_attempt(pair[0], "latest", status="succeeded")
        await store.update_rollout(more[0].rollout_id, status="cancelled")
        ended = await store.wait_for_rollouts(rollout_ids=[pair[0], *(r.rollout_id for r in more)], timeout=0)
        assert sorted(r.status for r in ended) == ["cancelled", "succeeded"]
        statuses = await store.query_rollouts(status_in=["preparing"], sort_by="start_time")
        assert [(r.rollout_id, r.attempt.worker_id) for r in statuses] == [(more[1].rollout_id, "w")]  # type: ignore[union-attr]
        workers = await store.query_workers(sort_by="worker_id")
        assert [(w.worker_id, w.status) for w in workers] == [("idle", "idle"), ("w", "idle")]
        assert (await store.statistics())["total_spans"] == 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("theirs", "their client, our server")])
async def test_an_unknown_rollout_is_a_value_error_at_once(kind: str, tmp_path: Path) -> None:
    async with _store(kind, tmp_path) as store:
        attempted = await store.start_rollout({})
        gone = _span(attempted, 1).model_copy(update={"rollout_id": "ro-gone"})
        with pytest.raises(ValueError, match="ro-gone not found"):
            await store.add_span(gone)


async def test_a_reopened_store_has_all_data(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    for n in range(3):
        await store.enqueue_rollout({"n": n})
    attempted = await _taken(store)
    await store.add_span(_span(attempted, 1, reward=float("nan"), parts=[1.0, float("inf")]))
    store.close()
    store = SqliteLightningStore(tmp_path / "store.db")
    [span] = await store.query_spans(attempted.rollout_id)
    assert span.attributes == {"reward": "nan", "parts": "[1.0, inf]"}
    assert await store.get_next_span_sequence_id(attempted.rollout_id, "") == 2
    assert [(await _taken(store)).input for _ in range(2)] == [{"n": 1}, {"n": 2}]
    store.close()


async def test_a_failed_call_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    await store.enqueue_rollout({"n": 0})

    async def full(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store.collections.workers, "upsert", full)  # the last step of taking a rollout
        with pytest.raises(sqlite3.OperationalError):
            await store.dequeue_rollout("w")
    [rollout] = await store.query_rollouts()
    assert rollout.status == "queuing"
    assert not isinstance(rollout, AttemptedRollout)
    assert (await _taken(store)).attempt.sequence_id == 1
    store.close()


async def test_an_attempt_that_ended_is_not_revived_by_a_late_span() -> None:
    store = SqliteLightningStore(MEMORY)
    await store.enqueue_rollout({}, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    attempted = await _taken(store)
    await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="failed")
    await store.add_span(_span(attempted, 1))
    assert (await _taken(store)).attempt.sequence_id == 2


@pytest.mark.parametrize("value", ["a" * 200_000, list(range(5_000))], ids=["text", "numbers"])
async def test_the_memory_store_drops_the_spans_of_the_oldest_rollouts(value: Any) -> None:
    store = MemoryStore(span_bytes=1 << 20)
    for _ in range(10):
        await store.enqueue_rollout({})
    rollouts = [await _taken(store) for _ in range(10)]
    for attempted in rollouts:
        await store.add_span(_span(attempted, 1, value=value))
    with pytest.raises(RuntimeError, match="evicted"):
        await store.query_spans(rollouts[0].rollout_id)
    for attempted in rollouts[-2:]:
        assert len(await store.query_spans(attempted.rollout_id)) == 1


async def test_the_memory_store_gives_a_rollout_with_its_newest_attempt() -> None:
    store = MemoryStore()
    waiting = await store.enqueue_rollout({"q": [1]}, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    assert type(await store.get_rollout_by_id(waiting.rollout_id)) is Rollout
    for number in (1, 2):
        attempted = await _taken(store)
        found = await store.get_rollout_by_id(waiting.rollout_id)
        assert isinstance(found, AttemptedRollout)
        assert found.attempt == attempted.attempt == await store.get_latest_attempt(waiting.rollout_id)
        assert (found.attempt.sequence_id, found.input, found.status) == (number, {"q": [1]}, "preparing")
        assert AttemptedRollout.model_validate_json(pydantic_core.to_json(found)) == found
        await store.update_attempt(waiting.rollout_id, attempted.attempt.attempt_id, status="failed")
    assert found.status == "preparing"  # the store changes its own object
    assert (await store.get_rollout_by_id(waiting.rollout_id)).status == "failed"  # type: ignore[union-attr]


async def test_the_memory_store_finds_items_as_agent_lightnings() -> None:
    ours, theirs = MemoryStore().collections, InMemoryLightningStore().collections
    attempts = [
        Attempt(rollout_id=rollout, attempt_id=f"a{number}", sequence_id=number, start_time=0.0)
        for rollout in ("r1", "r2")
        for number in (1, 2)
    ]
    for collections in (ours, theirs):
        await collections.attempts.insert(attempts)
    newest: Any = {"name": "sequence_id", "order": "desc"}
    first, last = {"attempt_id": {"exact": "a1"}}, {"attempt_id": {"exact": "a2"}}
    for key, sort, found in (
        ({"rollout_id": {"exact": "r2"}, **first}, None, attempts[2]),
        ({"rollout_id": {"exact": "r2"}, **last}, newest, attempts[3]),
        ({"rollout_id": {"exact": "r3"}, **first}, None, None),
        ({"rollout_id": {"exact": "r1"}, "attempt_id": {"exact": "a3"}}, None, None),
        ({"rollout_id": {"exact": "r1"}}, newest, attempts[1]),
        ({"rollout_id": {"exact": "r1"}, "attempt_id": {"within": ["a2", "a3"]}}, None, attempts[1]),
        ({"rollout_id": {"exact": "r1"}, **last, "sequence_id": {"exact": 1}}, None, None),
    ):
        filters: Any = key
        assert [await each.attempts.get(filters, sort) for each in (ours, theirs)] == [found, found]


async def test_the_rollout_of_an_unresponsive_runner_returns_to_the_queue() -> None:
    store = SqliteLightningStore(MEMORY, scan_s=0)
    config = RolloutConfig(max_attempts=2, unresponsive_seconds=0.05, retry_condition=["unresponsive"])
    await store.enqueue_rollout({}, config=config)
    attempted = await _taken(store, "dead")
    await asyncio.sleep(0.1)
    again = await _taken(store, "alive")
    assert (again.rollout_id, again.attempt.sequence_id) == (attempted.rollout_id, 2)


def test_an_unusable_file_is_reported(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database at all, but long enough to be read as one" * 20)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as conn:
        conn.execute("CREATE TABLE mine (id int)")
    conn.close()
    damaged = tmp_path / "damaged.db"
    SqliteLightningStore(damaged).close()
    damaged.write_bytes(damaged.read_bytes().replace(b"CREATE TABLE rollouts", b"CREATE TABL\xcd rollouts"))
    used = SqliteLightningStore(tmp_path / "used.db")
    for path, message in (
        (damaged, "is not a SQLite database"),
        (text, "is not a SQLite database"),
        (other, "is not a store; give another file"),
        (tmp_path / "used.db", "is in use by another store"),
        (tmp_path / "no" / "folder.db", "give a file in a writable folder"),
    ):
        with pytest.raises(StoreFileError, match=message):
            SqliteLightningStore(path)
    used.close()
    with sqlite3.connect(other) as conn:
        assert conn.execute("SELECT count(*) FROM mine").fetchone() == (0,)
    conn.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/agl/enqueue_rollout", {}, 404, "this is a Lightning store with the API of agentlightning 0.3"),
        ("/v1/agl/spans", {"rollout_id": "r"}, 422, "does not fit agentlightning 0.3: attempt_id: Field required"),
        ("/v1/agl/rollouts/search", {"sort_by": "size"}, 400, "sort_by is 'size'; allowed: rollout_id"),
        ("/v1/agl/rollouts/search", {"limit": 0}, 400, "limit is 0"),
        ("/v1/agl/rollouts/ro-1", {"status": None}, 400, "status is null"),
        ("/v1/traces", {}, 400, "application/x-protobuf"),
        ("/v1/agl/batch", [["POST", "/rollouts"]], 422, "does not fit agentlightning 0.3: 0.2: Field required"),
    ],
)
async def test_the_response_to_a_bad_request_gives_the_reason(path: str, body: Any, status: int, message: str) -> None:
    async with (
        _served(SqliteLightningStore(MEMORY)) as url,
        aiohttp.ClientSession() as session,
        session.post(_with_token(url) + path, json=body) as reply,
    ):
        assert reply.status == status
        assert message in (await reply.json())["detail"]


async def test_simultaneous_requests_are_batched_and_answered_one_by_one() -> None:
    paths: list[str] = []

    @web.middleware
    async def noting(request: web.Request, handler: Any) -> Any:
        paths.append(request.path)
        return await handler(request)

    store = SqliteLightningStore(MEMORY)
    async with _served(store, noting) as url:
        client = StoreClient(url)
        await client.start()
        rollouts = await asyncio.gather(*(client.enqueue_rollout({"n": n}) for n in range(40)))
        taken = await asyncio.gather(*(client.dequeue_rollout(f"w{n}") for n in range(41)))
        there = [attempted for attempted in taken if attempted is not None]
        ids = [(each.rollout_id, each.attempt.attempt_id) for each in there]
        assert sorted(rollout_id for rollout_id, _ in ids) == sorted(rollout.rollout_id for rollout in rollouts)
        assert len({each.attempt.worker_id for each in there}) == len(there) == 40
        ids.insert(7, ("ro-nowhere", "at-nowhere"))
        ends = [client.update_attempt(*pair, status="succeeded") for pair in ids]
        ended = await asyncio.gather(*ends, return_exceptions=True)
        refused = [place for place, each in enumerate(ended) if isinstance(each, ValueError)]
        assert (refused, sum(not isinstance(each, Exception) for each in ended)) == ([7], 40)
        assert await asyncio.gather(*(client.get_rollout_by_id(name) for name in ("ro-a", "ro-b"))) == [None, None]
        await client.stop()
    assert len(paths) < 60, f"{len(paths)} requests for 123"


async def test_batches_stay_below_the_size_that_the_store_refuses() -> None:
    sizes: list[int] = []

    @web.middleware
    async def noting(request: web.Request, handler: Any) -> Any:
        sizes.append(request.content_length or 0)
        return await handler(request)

    async with _served(SqliteLightningStore(MEMORY), noting) as url:
        client = StoreClient(url)
        await client.start()
        attempted = await client.start_rollout({})
        spans = [_span(attempted, number, payload="x" * (1 << 20)) for number in range(1, 21)]
        assert len(await asyncio.gather(*(client.add_many_spans([span]) for span in spans))) == 20
        assert len(await client.query_spans(attempted.rollout_id)) == 20
        await client.stop()
    assert 4 << 20 > max(sizes) > 2 << 20


async def test_a_failing_request_does_not_affect_the_others_of_its_batch() -> None:
    store = SqliteLightningStore(MEMORY)
    attempted = await store.start_rollout({})
    too_much = _span(attempted, 1 << 63).model_dump_json()  # too large for a column
    asked = [["POST", "/nowhere", ""], ["GET", "/statistics", ""], ["POST", "/spans", too_much]]
    asked.append(["POST", "/queues/rollouts/enqueue", '{"rollouts": [{"input": {}}]}'])
    async with (
        _served(store) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{_with_token(url)}/v1/agl/batch", json=asked) as reply,
    ):
        answers = await reply.json()
    assert [status for status, _ in answers] == [404, 200, 400, 201]
    assert "no POST /nowhere here" in answers[0][1]
    assert "sequence_id is 9223372036854775808" in answers[2][1]


async def test_a_closed_client_sends_no_requests() -> None:
    async with _served(SqliteLightningStore(MEMORY)) as url:
        client = StoreClient(url)
        await client.start()
        await client.stop()
        with pytest.raises(RuntimeError, match="is closed"):
            await client.dequeue_rollout()


async def test_opentelemetry_spans_are_accepted() -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    store = SqliteLightningStore(MEMORY)
    attempted = await store.start_rollout({})
    ids = {
        "agentlightning.rollout_id": attempted.rollout_id,
        "agentlightning.attempt_id": attempted.attempt.attempt_id,
    }
    tracer = TracerProvider(resource=Resource.create(ids)).get_tracer("test")
    span = tracer.start_span("work", attributes={"tokens": 3})
    span.end()
    body = gzip.compress(encode_spans([span]).SerializeToString())  # type: ignore[list-item]
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
    async with (
        _served(store) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{_with_token(url)}/v1/traces", data=body, headers=headers) as reply,
    ):
        assert reply.status == 200
    [stored] = await store.query_spans(attempted.rollout_id)
    assert (stored.name, stored.attributes["tokens"], stored.sequence_id) == ("work", 3, 1)


async def test_a_client_waits_for_its_store_and_then_gives_up() -> None:
    async with _served(SqliteLightningStore(MEMORY)) as url:
        client = StoreClient(url, timeout_s=0.3)
        await client.start()
        assert await client.dequeue_rollout() is None
    with pytest.raises(StoreGoneError, match=f"the store at {url} has been away for"):
        await client.dequeue_rollout()
    await client.stop()


def _start(*arguments: str) -> Program:
    return Program("-m", "train.store", *arguments)


async def test_nothing_acknowledged_is_lost_when_the_store_is_killed(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ("--path", str(tmp_path / "store.db"), "--port", str(port))
    process = _start(*arguments)
    url = f"http://127.0.0.1:{port}"
    await asyncio.to_thread(check_store, url, timeout_s=30)
    client = StoreClient(url)
    await client.start()
    acknowledged: dict[str, list[int]] = {}
    stop_at = time.monotonic() + 60

    async def work(worker: str) -> None:
        while len(acknowledged) < 60 and time.monotonic() < stop_at:
            await client.enqueue_rollout({})
            attempted = await client.dequeue_rollout(worker)
            if attempted is None:  # the response to a dequeue was lost; its rollout waits for its time limit
                continue
            pair = (attempted.rollout_id, attempted.attempt.attempt_id)
            numbers = await client.get_many_span_sequence_ids([pair] * 4)
            await client.add_many_spans([_span(attempted, number, payload="x" * 1000) for number in numbers])
            await client.update_attempt(*pair, status="succeeded")
            acknowledged[attempted.rollout_id] = list(numbers)  # earlier ids may have been lost with the store

    workers = [asyncio.create_task(work(f"w{n}")) for n in range(4)]
    for floor in (10, 30):
        while len(acknowledged) < floor:
            await asyncio.sleep(0.005)
            assert time.monotonic() < stop_at
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(30).returncode == -signal.SIGKILL
        process = _start(*arguments)
    await asyncio.gather(*workers)
    for rollout_id, numbers in acknowledged.items():
        rollout = await client.get_rollout_by_id(rollout_id)
        assert rollout is not None
        assert rollout.status == "succeeded"
        assert [span.sequence_id for span in await client.query_spans(rollout_id)] == numbers
    await client.stop()
    taken = _start(*arguments).wait(30)
    assert taken.stderr == (
        f"error: port {port} on 127.0.0.1 is in use: stop the server there, or give another --port\n"
    )
    assert taken.returncode == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(30).returncode == 0


def test_exactly_one_kind_of_store_must_be_chosen() -> None:
    done = _start().wait(30)
    assert (done.returncode, done.stderr) == (2, "error: give one of --path FILE, --memory and --mongo URI\n")


async def test_a_store_in_mongodb_is_there_after_a_restart_and_rolls_back() -> None:
    pytest.importorskip("pymongo")
    server = FakeMongo()
    async with _mongo(server) as store:
        first = await store.enqueue_rollout({"n": 1})
    async with _mongo(server) as store:
        assert (await _taken(store)).rollout_id == first.rollout_id
        assert "commitTransaction" in server.commands
        with pytest.raises(ValueError, match="not found"):
            await store.update_attempt(first.rollout_id, "at-unknown", status="failed")
        rollout = await store.get_rollout_by_id(first.rollout_id)
        assert rollout is not None
        assert rollout.status == "preparing"


async def test_a_mongodb_without_a_replica_set_is_refused() -> None:
    pytest.importorskip("pymongo")
    with pytest.raises(MongoStoreError, match="start mongod with --replSet rs0"):
        async with _mongo(FakeMongo(replica_set=None)):
            pass


def test_mongodb_without_its_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "groundwire.train.store.backends.mongo",
        "agentlightning.store.mongo",
        "agentlightning.store.collection.mongo",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pymongo", None)
    with pytest.raises(CommandError, match=r"--mongo needs MongoDB's driver .* pip install 'agentlightning\[mongo\]'"):
        _open_store(None, "mongodb://127.0.0.1:9/")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("mongodb://me:secret@127.0.0.1:9/", "MongoDB cannot be used: 127.0.0.1:9: [Errno 111] Connection refused"),
        ("http://127.0.0.1:9", "MongoDB cannot be used: Invalid URI scheme"),
    ],
)
def test_an_unusable_mongodb_is_reported_in_one_line(uri: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pymongo")
    monkeypatch.setattr("groundwire.train.store.backends.mongo._TIMEOUT_MS", 300)  # the driver waits, though refused
    with pytest.raises(MongoStoreError) as caught:
        _open_store(None, uri)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
