"""The store in a file behaves like Agent Lightning's own to its clients, and loses nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from external_processes import DEADLINE_S, answers, free_port
from lightning import mongo_store
from mongo_wire import FakeMongo
from programs import Program, until

from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools.errors import CommandError
from groundwire.tools.http.access_token import access_token
from groundwire.tools.http.server import Runner
from groundwire.train.store.__main__ import _open_store
from groundwire.train.store.agent_lightning import span_json
from groundwire.train.store.errors import MongoStoreError, StoreFileError, StoreGoneError
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import ProxyLLM, Rollout
from groundwire.train.store.server import application
from groundwire.train.store.sqlite import MEMORY


def _call(rollout: Rollout, sequence: int = 1, **fields: Any) -> LLMCall:
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempts[-1].attempt_id}
    return LLMCall(sequence=sequence, prompt_ids=[1], response_ids=[2], logprobs=[-0.5], **ids, **fields)


async def _take(store: Any, **fields: Any) -> Rollout:
    await store.enqueue([Rollout(task={}, **fields)])
    [rollout] = await store.dequeue(1, "w")
    return rollout


@asynccontextmanager
async def _served(store: Any, *middlewares: Any) -> AsyncIterator[str]:
    app = application(store, access_token())
    app.middlewares.extend(middlewares)
    runner = Runner(app)
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
async def _lightning(kind: str, tmp_path: Path) -> AsyncIterator[Any]:
    """A store with Agent Lightning's methods and types."""
    pytest.importorskip("agentlightning")
    from agentlightning.store.client_server import LightningStoreClient
    from agentlightning.store.memory import InMemoryLightningStore

    if kind == "theirs":
        yield InMemoryLightningStore()
    elif kind == "their client, MongoDB":
        pytest.importorskip("pymongo")
        async with mongo_store(FakeMongo()) as store, _served(store) as url:
            client = LightningStoreClient(_with_token(url))
            yield client
            await client.close()
    else:
        store = LightningStore(tmp_path / "store.db", scan_s=0)
        async with _served(store) as url:
            client = LightningStoreClient(_with_token(url))
            yield client
            await client.close()
        store.close()


def _their_span(attempted: Any, sequence: int, name: str = "call", **attributes: Any) -> Any:
    from agentlightning.types import Span, SpanCoreFields, TraceStatus

    status = TraceStatus(status_code="OK")
    fields = SpanCoreFields(name=name, attributes=attributes, status=status, start_time=1.0, end_time=2.0)
    ids = {"rollout_id": attempted.rollout_id, "attempt_id": attempted.attempt.attempt_id}
    return Span.from_core_fields(fields, sequence_id=sequence, **ids)


KINDS = ("theirs", "their client, our server", "their client, MongoDB")


async def test_a_client_reads_a_policys_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = LightningStore(MEMORY)
    policy = ProxyLLM(endpoint="http://a/v1", model="m")
    async with _served(store) as url:
        client = RemoteStore(url)
        await client.start()
        await client.put_resources("named", {"policy": policy})
        assert await client.get_resources("named") == {"policy": policy} == await store.get_resources(None)
        await client.stop()
    assert not caplog.records


@pytest.mark.parametrize("kind", KINDS)
async def test_all_stores_behave_alike_to_agent_lightning(kind: str, tmp_path: Path) -> None:
    types = pytest.importorskip("agentlightning.types")
    async with _lightning(kind, tmp_path) as store:
        resources = await store.add_resources({"policy": types.ProxyLLM(endpoint="http://a/v1", model="m")})
        await store.update_resources("rs-named", {"policy": types.ProxyLLM(endpoint="http://b/v1", model="m")})
        latest = await store.get_latest_resources()
        assert latest is not None
        assert (latest.resources_id, latest.version) == ("rs-named", 1)
        assert [one.resources_id for one in await store.query_resources()] == [resources.resources_id, "rs-named"]
        config = types.RolloutConfig(max_attempts=2, retry_condition=["failed"])
        first = await store.enqueue_rollout({"n": 0}, mode="train", config=config, metadata={"group": "g"})
        more = await store.enqueue_many_rollouts([types.EnqueueRolloutRequest(input={"n": n}) for n in (1, 2)])
        assert (first.status, first.resources_id) == ("queuing", "rs-named")

        attempted = await store.dequeue_rollout("w")
        assert (attempted.input, attempted.status, attempted.mode) == ({"n": 0}, "preparing", "train")
        pair = (attempted.rollout_id, attempted.attempt.attempt_id)
        assert list(await store.get_many_span_sequence_ids([pair, pair])) == [1, 2]
        assert await store.get_next_span_sequence_id(*pair) == 3
        spans = [_their_span(attempted, 2, "b", text="x" * 10), _their_span(attempted, 1, "a", ids=[1, 2])]
        assert len(await store.add_many_spans(spans)) == 2
        assert await store.add_span(_their_span(attempted, 7, "late")) is not None
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
        assert [(await store.dequeue_rollout("w")).input for _ in range(3)] == [{"n": 1}, {"n": 2}, {"n": 0}]
        assert await store.dequeue_rollout("idle") is None
        assert [a.status for a in await store.query_attempts(pair[0])] == ["failed", "preparing"]
        await store.update_attempt(pair[0], "latest", status="succeeded")
        await store.update_rollout(more[0].rollout_id, status="cancelled")
        ended = await store.wait_for_rollouts(rollout_ids=[pair[0], *(r.rollout_id for r in more)], timeout=0)
        assert sorted(r.status for r in ended) == ["cancelled", "succeeded"]
        assert list(await store.wait_for_rollouts(rollout_ids=["ro-gone"], timeout=0)) == []
        statuses = await store.query_rollouts(status_in=["preparing"], sort_by="start_time")
        assert [(r.rollout_id, r.attempt.worker_id) for r in statuses] == [(more[1].rollout_id, "w")]  # type: ignore[union-attr]
        workers = await store.query_workers(sort_by="worker_id")
        assert [(w.worker_id, w.status) for w in workers] == [("idle", "idle"), ("w", "idle")]
        assert (await store.statistics())["total_spans"] == 3


async def test_a_reopened_store_has_all_data(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    await store.enqueue([Rollout(task={"n": n}, sampling={"seed": n}, resources_id="run") for n in range(3)])
    [taken] = await store.dequeue(1, "w")
    ids = {"rollout_id": taken.rollout_id, "attempt_id": taken.attempts[0].attempt_id}
    attributes = {"reward": float("nan"), "parts": [1.0, float("inf")]}
    span = SpanRecord(name="a", sequence_id=4, attributes=attributes, start_time=1.0, end_time=2.0, **ids)
    call = _call(taken, 5, reply_json='{"content": "1"}')
    await store.add_annotations([span])
    await store.add_calls([call])
    await store.put_resources("run", {"policy": ProxyLLM(endpoint="http://a/v1", model="m")})
    store.close()
    store = LightningStore(tmp_path / "store.db")
    found = await store.get(taken.rollout_id)
    assert found is not None
    assert (found.calls, found.status, found.attempts[0].worker_id) == ([call], "running", "w")
    assert found.annotations[0].attributes == {"reward": "NaN", "parts": [1.0, "Infinity"]}
    assert await store.reserve_sequence_ids([(taken.rollout_id, "")]) == [6]
    again = await store.dequeue(3)
    assert [(rollout.task, rollout.sampling) for rollout in again] == [({"n": n}, {"seed": n}) for n in (1, 2)]
    assert await store.get_resources("run") == {"policy": ProxyLLM(endpoint="http://a/v1", model="m")}
    store.close()


async def test_a_failed_call_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LightningStore(tmp_path / "store.db")
    await store.enqueue([Rollout(task={})])

    def full(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_change_worker", full)  # the last step of taking a rollout
        with pytest.raises(sqlite3.OperationalError):
            await store.dequeue_many_rollouts(worker_id="w")
    [rollout] = (await store.query_rollouts())["items"]
    assert rollout["status"] == "queuing"
    assert "attempt" not in rollout
    assert [rollout.attempts[-1].number for rollout in await store.dequeue(2)] == [1]
    store.close()


def test_a_file_of_an_older_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    LightningStore(path).close()
    with sqlite3.connect(path) as conn:
        conn.execute("PRAGMA user_version=1")
    conn.close()
    with pytest.raises(StoreFileError, match=r"store\.db is a store of version 1, not 2; give another file$"):
        LightningStore(path)


def test_an_unusable_file_is_reported(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database at all, but long enough to be read as one" * 20)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as conn:
        conn.execute("CREATE TABLE mine (id int)")
    conn.close()
    damaged = tmp_path / "damaged.db"
    LightningStore(damaged).close()
    damaged.write_bytes(damaged.read_bytes().replace(b"CREATE TABLE rollouts", b"CREATE TABL\xcd rollouts"))
    used = LightningStore(tmp_path / "used.db")
    for path, message in (
        (damaged, "is not a SQLite database"),
        (text, "is not a SQLite database"),
        (other, "is not a store; give another file"),
        (tmp_path / "used.db", "is in use by another store"),
        (tmp_path / "no" / "folder.db", "give a file in a writable folder"),
    ):
        with pytest.raises(StoreFileError, match=message):
            LightningStore(path)
    used.close()
    with sqlite3.connect(other) as conn:
        assert conn.execute("SELECT count(*) FROM mine").fetchone() == (0,)
    conn.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/agl/enqueue_rollout", {}, 404, "this is a Lightning store with the API of agentlightning 0.3"),
        ("/v1/agl/spans", {"rollout_id": "r"}, 422, "does not fit agentlightning 0.3: attempt_id: Field required"),
        ("/v1/agl/rollouts/search", {"sort_by": "size"}, 422, "sort_by: Input should be 'input', 'mode'"),
        ("/v1/agl/rollouts/search", {"limit": 0}, 422, "limit: it must be above 0, or -1"),
        ("/v1/agl/rollouts/ro-1", {"status": None}, 422, "status: Input should be 'queuing'"),
        ("/v1/traces", {}, 400, "application/x-protobuf"),
        ("/v1/agl/batch", [["POST", "/rollouts"]], 422, "does not fit agentlightning 0.3: 0.2: Field required"),
    ],
)
async def test_the_response_to_a_bad_request_gives_the_reason(path: str, body: Any, status: int, message: str) -> None:
    async with (
        _served(LightningStore(MEMORY)) as url,
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

    store = LightningStore(MEMORY)
    async with _served(store, noting) as url:
        client = RemoteStore(url)
        await client.start()
        rollouts = [Rollout(task={"n": n}) for n in range(40)]
        await asyncio.gather(*(client.enqueue([rollout]) for rollout in rollouts))
        answers = await asyncio.gather(*(client.dequeue(1, f"w{n}") for n in range(41)))
        taken = [rollout for answer in answers for rollout in answer]
        ids = [(rollout.rollout_id, rollout.attempts[-1].attempt_id) for rollout in taken]
        assert sorted(rollout_id for rollout_id, _ in ids) == sorted(rollout.rollout_id for rollout in rollouts)
        assert len({rollout.attempts[-1].worker_id for rollout in taken}) == len(taken) == 40
        ids.insert(7, ("ro-nowhere", "at-nowhere"))
        ends = [client.end_attempt(*pair, None, failed=False) for pair in ids]
        ended = await asyncio.gather(*ends, return_exceptions=True)
        refused = [place for place, answer in enumerate(ended) if isinstance(answer, ValueError)]
        assert (refused, sum(not isinstance(answer, Exception) for answer in ended)) == ([7], 40)
        assert await asyncio.gather(*(client.get(name) for name in ("ro-a", "ro-b"))) == [None, None]
        await client.stop()
    assert len(paths) < 60, f"{len(paths)} requests for 123"


async def test_batches_stay_below_the_size_that_the_store_refuses() -> None:
    sizes: list[int] = []

    @web.middleware
    async def noting(request: web.Request, handler: Any) -> Any:
        sizes.append(request.content_length or 0)
        return await handler(request)

    async with _served(LightningStore(MEMORY), noting) as url:
        client = RemoteStore(url)
        await client.start()
        rollout = await _take(client)
        calls = [_call(rollout, number, reply_json=f'{{"content": "{"x" * (1 << 18)}"}}') for number in range(1, 21)]
        await asyncio.gather(*(client.add_calls([call]) for call in calls))
        await client.add_calls(calls)
        found = await client.get(rollout.rollout_id)
        assert found is not None
        assert found.calls == calls
        await client.stop()
    assert 5 << 18 > max(sizes) > 2 << 18


async def test_a_failing_request_does_not_affect_the_others_of_its_batch() -> None:
    store = LightningStore(MEMORY)
    rollout = await _take(store)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempts[-1].attempt_id}
    span = SpanRecord(name="a", sequence_id=1 << 63, attributes={}, start_time=1.0, end_time=2.0, **ids)
    too_much = json.dumps(span_json(span))  # too large for a column
    asked = [["POST", "/nowhere", ""], ["GET", "/statistics", ""], ["POST", "/spans", too_much]]
    asked.append(["POST", "/queues/rollouts/enqueue", '{"rollouts": [{"input": {}}]}'])
    async with (
        _served(store) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{_with_token(url)}/v1/agl/batch", json=asked) as reply,
    ):
        answers = await reply.json()
    assert [status for status, _ in answers] == [404, 200, 422, 201]
    assert "no POST /nowhere here" in answers[0][1]
    assert "sequence_id: Input should be" in answers[2][1]


async def test_a_closed_client_sends_no_requests() -> None:
    async with _served(LightningStore(MEMORY)) as url:
        client = RemoteStore(url)
        await client.start()
        await client.stop()
        with pytest.raises(RuntimeError, match="is closed"):
            await client.dequeue(1)


async def test_opentelemetry_spans_are_accepted() -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    store = LightningStore(MEMORY)
    rollout = await _take(store)
    attempt_id = rollout.attempts[-1].attempt_id
    ids = {"agentlightning.rollout_id": rollout.rollout_id, "agentlightning.attempt_id": attempt_id}
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
    found = await store.get(rollout.rollout_id)
    assert found is not None
    [stored] = found.annotations
    assert (stored.name, stored.attributes["tokens"], stored.sequence_id) == ("work", 3, 1)


async def test_a_client_waits_for_its_store_and_then_gives_up() -> None:
    async with _served(LightningStore(MEMORY)) as url:
        client = RemoteStore(url, timeout_s=0.3)
        await client.start()
        assert await client.dequeue(1) == []
    with pytest.raises(StoreGoneError, match=f"the store at {url} has been away for"):
        await client.dequeue(1)
    await client.stop()


def _start(*arguments: str) -> Program:
    return Program("-m", "train.store", *arguments)


async def test_nothing_acknowledged_is_lost_when_the_store_is_killed(tmp_path: Path) -> None:
    port = free_port()
    arguments = ("--path", str(tmp_path / "store.db"), "--port", str(port))
    process = _start(*arguments)
    url = f"http://127.0.0.1:{port}"
    await asyncio.to_thread(until, partial(answers, url), process)
    client = RemoteStore(url)
    await client.start()
    acknowledged: dict[str, list[int]] = {}
    stop_at = time.monotonic() + DEADLINE_S

    async def work(worker: str) -> None:
        while len(acknowledged) < 60 and time.monotonic() < stop_at:
            await client.enqueue([Rollout(task={})])
            taken = await client.dequeue(1, worker)
            if not taken:  # the response to a dequeue was lost; its rollout waits for its time limit
                continue
            pair = (taken[0].rollout_id, taken[0].attempts[-1].attempt_id)
            numbers = await client.reserve_sequence_ids([pair] * 4)
            await client.add_calls([_call(taken[0], number, reply_json="x" * 1000) for number in numbers])
            await client.end_attempt(*pair, None, failed=False)
            acknowledged[pair[0]] = list(numbers)  # earlier ids may have been lost with the store

    workers = [asyncio.create_task(work(f"w{n}")) for n in range(4)]
    for floor in (10, 30):
        while len(acknowledged) < floor:
            await asyncio.sleep(0.005)
            assert time.monotonic() < stop_at
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(600).returncode == -signal.SIGKILL
        process = _start(*arguments)
    await asyncio.gather(*workers)
    for rollout_id, numbers in acknowledged.items():
        rollout = await client.get(rollout_id)
        assert rollout is not None
        assert rollout.status == "succeeded"
        assert [call.sequence for call in rollout.calls] == numbers
    await client.stop()
    taken = _start(*arguments).wait(600)
    assert taken.stderr == (
        f"error: port {port} on 127.0.0.1 is in use: stop the server there, or give another --port or --host\n"
    )
    assert taken.returncode == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(600).returncode == 0


def test_exactly_one_kind_of_store_must_be_chosen() -> None:
    done = _start().wait(600)
    assert (done.returncode, done.stderr) == (2, "error: give one of --path FILE, --memory and --mongo URI\n")


async def test_a_store_in_mongodb_is_there_after_a_restart_and_rolls_back() -> None:
    pytest.importorskip("agentlightning")
    pytest.importorskip("pymongo")
    server, first = FakeMongo(), Rollout(task={"n": 1})

    @asynccontextmanager
    async def mongo() -> AsyncIterator[RemoteStore]:
        async with mongo_store(server) as store, _served(store) as url:
            client = RemoteStore(url)
            await client.start()
            yield client
            await client.stop()

    async with mongo() as store:
        await store.enqueue([first])
    async with mongo() as store:
        assert [rollout.rollout_id for rollout in await store.dequeue(1)] == [first.rollout_id]
        assert "commitTransaction" in server.commands
        with pytest.raises(ValueError, match="not found"):
            await store.end_attempt(first.rollout_id, "at-unknown", None, failed=True)
        found = await store.get(first.rollout_id)
        assert found is not None
        assert found.status == "preparing"


async def test_a_mongodb_without_a_replica_set_is_refused() -> None:
    pytest.importorskip("agentlightning")
    pytest.importorskip("pymongo")
    with pytest.raises(MongoStoreError, match="start mongod with --replSet rs0"):
        async with mongo_store(FakeMongo(replica_set=None)):
            pass


def test_mongodb_without_its_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "groundwire.train.store.mongo",
        "agentlightning.store.mongo",
        "agentlightning.store.collection.mongo",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pymongo", None)
    with pytest.raises(CommandError, match=r"--mongo needs .* 'groundwire\[agentlightning\]'"):
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
    monkeypatch.setattr("groundwire.train.store.mongo._TIMEOUT_MS", 300)  # the driver waits, though refused
    with pytest.raises(MongoStoreError) as caught:
        _open_store(None, uri)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
