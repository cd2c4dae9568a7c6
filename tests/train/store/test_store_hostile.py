"""The store refuses values that it cannot hold, and a refused value harms nothing else."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import sqlite3
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools.http.access_token import access_token
from groundwire.tools.http.server import Runner
from groundwire.train.store.agent_lightning import Request, SpanFields, span_json
from groundwire.train.store.errors import StoreFailedError, StoreGoneError
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.routes import ROUTES
from groundwire.train.store.server import application, bind, serve
from groundwire.train.store.sqlite import MEMORY

_DEEP = json.loads("[" * 100 + "]" * 100)


def _span(attempted: dict[str, Any], sequence: int = 1, **changes: Any) -> dict[str, Any]:
    ids = {"rollout_id": attempted["rollout_id"], "attempt_id": attempted["attempt"]["attempt_id"]}
    record = SpanRecord(name="call", sequence_id=sequence, attributes={}, start_time=1.0, end_time=2.0, **ids)
    return {**span_json(record), **changes}


async def _next_number(store: LightningStore, attempted: dict[str, Any]) -> int:
    [number] = await store.get_many_span_sequence_ids([(attempted["rollout_id"], "")])
    return number


async def _numbers(store: LightningStore, attempted: dict[str, Any]) -> list[int]:
    return [span["sequence_id"] for span in (await store.query_spans(attempted["rollout_id"]))["items"]]


def _otlp(*ids: dict[str, Any]) -> ExportTraceServiceRequest:
    """One span for each dict of span attributes; ``rollout_id`` etc. without their prefix."""
    tracer = TracerProvider(resource=Resource.create({})).get_tracer("test")
    spans = []
    for attributes in ids:
        span = tracer.start_span(
            "work", attributes={f"agentlightning.{key}": value for key, value in attributes.items()}
        )
        span.end()
        spans.append(span)
    return encode_spans(spans)  # type: ignore[arg-type]


class _Server:
    def __init__(self, store: LightningStore, url: str, session: aiohttp.ClientSession) -> None:
        self.store, self.url, self._session = store, url, session

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        if not isinstance(body, (bytes, AsyncIterator)):
            body = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        async with self._session.post(self.url + "/v1/agl" + path, data=body, headers=headers) as reply:
            return reply.status, await reply.json()

    async def export(self, body: bytes, **headers: str) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/x-protobuf", **headers}
        async with self._session.post(self.url + "/v1/traces", data=body, headers=headers) as reply:
            return reply.status, await reply.read()


@asynccontextmanager
async def _serving() -> AsyncIterator[_Server]:
    store = LightningStore(MEMORY)
    token = access_token()
    session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})
    async with serve(store, bind("127.0.0.1", 0), token=token) as url, session:
        yield _Server(store, url, session)
    store.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sequence_id": 2**63 - 1}, f"sequence_id: Input should be less than or equal to {2**53}"),
        ({"sequence_id": -1}, "sequence_id: Input should be greater than or equal to 0"),
        ({"span_id": "s" * 257}, "span_id: String should have at most 256 characters"),
        (
            {"attempt_id": "a\nforged log line"},
            r"attempt_id: 'a\nforged log line' has characters that cannot be printed",
        ),
        ({"trace_id": "\x00"}, r"trace_id: '\x00' has characters that cannot be printed"),
        ({"start_time": float("inf")}, "start_time: Input should be less than 253402300800"),
        ({"end_time": -1.0}, "end_time: Input should be greater than or equal to 0"),
        ({"events": [{"name": "e", "attributes": {}, "timestamp": 1e300}]}, "events.0.timestamp: Input should be less"),
        ({"more": _DEEP}, "the JSON is nested more than 64 levels deep"),
        ({"links": [{"context": None}]}, "does not fit agentlightning 0.3: links.0.context: "),
        ({"rollout_id": "ro-gone"}, "Rollout ro-gone not found"),
    ],
)
async def test_a_span_that_cannot_be_stored_is_refused_and_the_others_are_stored(
    changes: dict[str, Any], reason: str
) -> None:
    async with _serving() as server:
        bad, good = [await server.store.start_rollout(input={}) for _ in range(2)]
        status, reply = await server.post("/spans/batch", [_span(bad, **changes), _span(bad, 7), _span(good, 3)])
        assert status == 400
        assert reason in reply["detail"]
        assert "1 of 3 spans were refused, the others are stored" in reply["detail"]
        for attempted, number in ((bad, 7), (good, 3)):
            assert await _numbers(server.store, attempted) == [number]
            assert await _next_number(server.store, attempted) == number + 1
        status, reply = await server.post("/spans", _span(bad, **changes))
        assert status in (404, 422)
        assert reason in reply["detail"]


async def test_an_otlp_span_that_cannot_be_stored_is_refused_and_the_others_are_stored() -> None:
    async with _serving() as server:
        bad, good = [await server.store.start_rollout(input={}) for _ in range(2)]

        def ids(attempted: dict[str, Any]) -> dict[str, Any]:
            return {"rollout_id": attempted["rollout_id"], "attempt_id": attempted["attempt"]["attempt_id"]}

        export = _otlp(
            {**ids(bad), "span_sequence_id": 2**63 - 1},
            {**ids(bad), "rollout_id": "ro-gone"},
            {**ids(bad), "attempt_id": "at\nforged log line"},
            ids(good),
        )
        status, reply = await server.export(export.SerializeToString())
        assert status == 200
        partial = ExportTraceServiceResponse.FromString(reply).partial_success
        assert partial.rejected_spans == 3
        assert "3 of 4 spans were refused, the others are stored: " in partial.error_message
        assert await _next_number(server.store, bad) == 1
        assert await _numbers(server.store, good) == [1]
        status, reply = await server.export(_otlp({**ids(bad), "span_sequence_id": 2**63 - 1}).SerializeToString())
        assert status == 400
        assert b"sequence_id: Input should be less than" in reply


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/queues/rollouts/dequeue", {"limit": 10**30}, "limit: Input should be less than"),
        ("/queues/rollouts/dequeue", {"worker_id": "w\n"}, r"worker_id: 'w\n' has characters"),
        ("/rollouts/search", {"offset": 10**30}, "offset: Input should be less than"),
        ("/rollouts/search", {"rollout_id_in": ["r"] * 10_001}, "rollout_id_in: List should have at most 10000 items"),
        (
            "/waits/rollouts",
            {"rollout_ids": ["r" * 300], "timeout": 0},
            "rollout_ids.0: String should have at most 256 characters",
        ),
        ("/spans/next/batch", [["r", "a"]] * 10_001, "List should have at most 10000 items"),
        ("/spans/next", {"rollout_id": "r\r", "attempt_id": "a"}, r"rollout_id: 'r\r' has characters"),
        (
            "/rollouts",
            {"input": {}, "config": {"max_attempts": 10**30}},
            "config.max_attempts: Input should be less than",
        ),
        (
            "/rollouts",
            {"input": {}, "config": {"timeout_seconds": float("nan")}},
            "config.timeout_seconds: Input should be a finite number",
        ),
        ("/rollouts", {"input": {"a": [1, {"b": math.nan}]}}, "input: a.1.b is nan, which is no number in JSON"),
        ("/rollouts", {"input": math.inf}, "input: it is inf, which is no number in JSON"),
        ("/queues/rollouts/enqueue", {"rollouts": [{"input": {"x": -math.inf}}]}, "rollouts.0.input: x is -inf, which"),
        ("/rollouts/r", {"input": {"x": [math.nan]}}, "input: x.0 is nan, which is no number in JSON"),
        ("/rollouts", {"input": {}, "metadata": {"sampling": {"top_p": math.nan}}}, "metadata: sampling.top_p is nan"),
        ("/workers/w", {"heartbeat_stats": {"load": math.nan}}, "heartbeat_stats: load is nan, which is no number"),
        (
            "/rollouts",
            {"input": {}, "metadata": {"trace_limit": {"spans": "many"}}},
            "trace_limit.spans: Input should be a valid integer",
        ),
        ("/rollouts", {"input": {}, "metadata": {"a": _DEEP}}, "nested more than 64 levels deep"),
        ("/queues/rollouts/enqueue", {"rollouts": [{"input": _DEEP}]}, "nested more than 64 levels deep"),
        ("/workers/w", {"heartbeat_stats": {"a": _DEEP}}, "nested more than 64 levels deep"),
        ("/workers/w%0A", {}, r"worker_id: 'w\n' has characters"),
        ("/rollouts/r/attempts/a", {"last_heartbeat_time": 1e300}, "last_heartbeat_time: Input should be less than"),
    ],
)
async def test_values_out_of_range_are_refused_with_a_reason(path: str, body: Any, reason: str) -> None:
    async with _serving() as server:
        status, reply = await server.post(path, body)
        assert status in (400, 422)
        assert reason in reply["detail"]


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b"[]", b"0", b'""'])
async def test_no_body_of_another_form_is_a_failure_of_the_store(body: bytes) -> None:
    async with _serving() as server:
        for route in ROUTES:
            method, path = route.split()
            if method == "POST":
                path = path.format(rollout_id="r", attempt_id="a", worker_id="w", resources_id="s")
                status, _ = await server.post(path, body)
                assert status < 500, route


async def test_json_of_any_shape_is_stored_and_read_again() -> None:
    task = {"limit": -5, "user_id": "two\nlines", "start_time": -1e300, "list": list(range(20_000)), "n": 10**30}
    async with _serving() as server:
        client = RemoteStore(server.url)
        await client.start()
        rollout = Rollout(task=task, metadata={"deep": json.loads("[" * 40 + "]" * 40)})
        await client.enqueue([rollout])
        found = await client.get(rollout.rollout_id)
        assert found is not None
        assert (found.task, found.metadata) == (task, rollout.metadata)
        await client.stop()


async def test_many_rollouts_are_enqueued_in_requests_that_the_store_accepts() -> None:
    async with _serving() as server:
        client = RemoteStore(server.url)
        await client.start()
        large = [Rollout(task={"n": n, "text": "x" * (1 << 20)}) for n in range(40)]
        rollouts = [*large, *(Rollout(task={"n": n}) for n in range(40, 2500))]
        await client.enqueue(rollouts)
        await client.enqueue([])
        stored = await server.store.dequeue(3000)
        assert [rollout.task["n"] for rollout in stored] == list(range(2500))
        assert [rollout.rollout_id for rollout in stored] == [rollout.rollout_id for rollout in rollouts]
        await client.stop()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_spans_are_stored(encoding: str) -> None:
    async with _serving() as server:
        attempted = await server.store.start_rollout(input={})
        ids = {"rollout_id": attempted["rollout_id"], "attempt_id": attempted["attempt"]["attempt_id"]}
        compress = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
        body = compress(_otlp(ids).SerializeToString())
        assert (await server.export(body, **{"Content-Encoding": encoding}))[0] == 200
        assert await _numbers(server.store, attempted) == [1]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bomb", "more than 16 MiB when decompressed"),
        ("nested bomb", "Wire format was corrupt"),  # decompressed once, which is small
        ("cut", "the body is cut"),
        ("not gzip", "unknown compression method"),
    ],
)
async def test_compressed_spans_are_decompressed_within_a_limit(kind: str, reason: str) -> None:
    body = gzip.compress(bytes(64 << 20 if kind.endswith("bomb") else 1000))
    body = {"cut": body[:-9], "not gzip": b"\x1f\x8bno", "nested bomb": gzip.compress(body)}.get(kind, body)
    async with _serving() as server:
        status, reply = await server.export(body, **{"Content-Encoding": "gzip"})
        assert status == 400
        assert reply.startswith(b'{"detail":"the spans were refused: ')
        assert reason.encode() in reply


async def test_bodies_that_cannot_be_read_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _serving() as server:
        status, reply = await server.post("/spans", gzip.compress(b"{}"), **{"Content-Encoding": "gzip"})
        assert (status, reply["detail"]) == (415, "Content-Encoding is 'gzip'; supported: identity")
        status, reply = await server.post("/spans", b" " * (17 << 20))
        assert (status, reply["detail"]) == (413, "the request has more than 16 MiB")
        status, reply = await server.post("/spans", b"[" * (2 << 20))
        assert (status, reply["detail"].split(",")[0]) == (400, "the JSON of the request has 2097152 opening brackets")
        monkeypatch.setattr("groundwire.train.store.server._BODY_S", 0.1)

        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(60)

        status, reply = await server.post("/spans", slow())
        assert (status, reply["detail"]) == (408, "the request was not complete after 0.1 s")


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        ([1, 2.5, True], True),
        (["a", "b"], True),
        ([], True),
        (1.5, True),
        ("a", True),
        (["a", 1], False),
        ([[1]], False),
        ({"a": 1}, False),
        (None, False),
        ([None], False),
        ([0] * (1 << 20 | 1), False),
    ],
)
async def test_attributes_of_spans_are_checked(value: Any, accepted: bool) -> None:
    async with _serving() as server:
        attempted = await server.store.start_rollout(input={})
        status, reply = await server.post("/spans", _span(attempted, attributes={"key": value}))
        if accepted:
            [span] = (await server.store.query_spans(attempted["rollout_id"]))["items"]
            assert SpanFields.model_validate(span).attributes["key"] == value
        else:
            assert status == 422
            assert "attributes: attribute 'key' " in reply["detail"]


async def test_lists_come_in_pages_which_the_client_puts_together() -> None:
    async with _serving() as server:
        rollouts = [Rollout(task={"n": n}, resources_id="run") for n in range(2100)]
        await server.store.enqueue(rollouts)
        ids = [rollout.rollout_id for rollout in rollouts]
        for limit in (-1, 1500):
            status, page = await server.post("/rollouts/search", {"limit": limit})
            assert (status, len(page["items"]), page["total"]) == (200, 1000, 2100)
        _, page = await server.post("/rollouts/search", {"limit": 2, "offset": 3})
        assert [rollout["input"]["n"] for rollout in page["items"]] == [3, 4]
        client = RemoteStore(server.url)
        await client.start()
        assert await client.unfinished("run") == ids
        assert await client.count(ids) == 2100
        for rollout_id in ids:
            await server.store.cancel(rollout_id)
        assert await client.ended(ids) == ids
        await client.stop()


async def test_a_page_of_large_items_has_few_of_them() -> None:
    async with _serving() as server:
        rollouts = [Rollout(task={"n": n, "text": "x" * (6 << 20)}, resources_id="run") for n in range(5)]
        await server.store.enqueue(rollouts)
        _, page = await server.post("/rollouts/search", {})
        assert (len(page["items"]), page["total"]) == (1, 5)
        client = RemoteStore(server.url)
        await client.start()
        assert await client.unfinished("run") == [rollout.rollout_id for rollout in rollouts]
        await client.stop()


async def test_the_message_of_a_failing_server_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    failing = True

    @web.middleware
    async def fail(request: web.Request, handler: Any) -> Any:
        if failing and request.path.endswith("/rollouts/search"):
            return web.Response(status=503, text="away\nERROR forged")
        return await handler(request)

    app = application(LightningStore(MEMORY), access_token())
    app.middlewares.append(fail)
    runner = Runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = RemoteStore(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await client.start()
    query = asyncio.create_task(client.unfinished("run"))
    while not caplog.messages:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    failing = False
    assert list(await query) == []
    assert "(status 503: away ERROR forged)" in caplog.messages[0]
    await client.stop()
    await runner.cleanup()


async def test_a_batch_of_many_requests_is_refused() -> None:
    async with _serving() as server:
        status, reply = await server.post("/batch", [["GET", "/rollouts", ""]] * 65)
        assert status == 422
        assert "at most 64 items" in reply["detail"]


@pytest.mark.parametrize("body", [b"", b"null"])
async def test_a_missing_body_is_refused_where_one_is_needed(body: bytes) -> None:
    async with _serving() as server:
        for path in ("/spans", "/spans/batch", "/spans/next", "/spans/next/batch", "/waits/rollouts", "/rollouts"):
            status, reply = await server.post(path, body)
            assert (status, "does not fit agentlightning 0.3" in reply["detail"]) == (422, True)
        assert await server.post("/queues/rollouts/dequeue", body) == (200, [])


@asynccontextmanager
async def _damaged(path: Path, damage: str) -> AsyncIterator[tuple[str, list[str]]]:
    """The address of a store whose file of two rollouts is damaged by the statement ``damage``, and their ids."""
    store = LightningStore(path)
    rollouts = await store.enqueue_many_rollouts([Request(input={"n": n}) for n in range(2)])
    await store.get_many_span_sequence_ids([(rollouts[0]["rollout_id"], "a")])
    store.close()
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("PRAGMA ignore_check_constraints=ON")
        conn.execute("PRAGMA writable_schema=ON")
        conn.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute(damage)
    store = LightningStore(path)
    async with serve(store, bind("127.0.0.1", 0), token=access_token()) as url:
        yield url, [rollout["rollout_id"] for rollout in rollouts]
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE rollouts SET request = NULL WHERE id = 1",
        "UPDATE rollouts SET request = 7 WHERE id = 1",
        """UPDATE rollouts SET request = '{"input": "queu' WHERE id = 1""",
        "UPDATE rollouts SET request = CAST(x'ff' AS TEXT) WHERE id = 1",
        "UPDATE rollouts SET attempts = '[{}]' WHERE id = 1",
        "UPDATE rollouts SET status = 'queu' WHERE id = 1",
        "UPDATE queue SET rollout_id = NULL WHERE id = 1",
        "UPDATE rollouts SET last_number = 'text' WHERE id = 1",
    ],
)
async def test_a_damaged_value_of_the_stores_file_ends_its_request_with_one_sentence(
    damage: str, tmp_path: Path
) -> None:
    async with _damaged(tmp_path / "store.db", damage) as (url, ids):
        client = RemoteStore(url)
        await client.start()

        async def read() -> None:
            await client.reserve_sequence_ids([(ids[0], "a")])
            await client.get(ids[0])
            await client.dequeue(1)

        with pytest.raises(StoreFailedError, match=r"the store fails at .* start the store with a copy of the file"):
            await asyncio.wait_for(read(), 600)
        if "rollouts SET" in damage:
            assert (await client.get(ids[1])) is not None
        await client.stop()


async def test_a_request_that_alone_fails_ends_at_the_clients_deadline() -> None:
    @web.middleware
    async def fail(request: web.Request, handler: Any) -> Any:
        if request.path.endswith("/rollouts/search"):
            return web.Response(status=503, text="the store's file: disk I/O error")
        return await handler(request)

    app = application(LightningStore(MEMORY), access_token())
    app.middlewares.append(fail)
    runner = Runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = RemoteStore(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=0.5)
    await client.start()

    async def others() -> None:
        while True:
            await client.count([])
            await client.count(["ro-1"], ["running"])
            await asyncio.sleep(0.01)

    answered = asyncio.create_task(others())
    with pytest.raises(StoreGoneError, match=r"has been away for .* status 503: the store's file: disk I/O error"):
        await asyncio.wait_for(client.unfinished("run"), 600)
    answered.cancel()
    await client.stop()
    await runner.cleanup()


async def test_spans_that_meet_a_full_disk_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _serving() as server:
        taken = await server.store.start_rollout(input={})

        async def full(*_: Any) -> Any:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(server.store, "add_many_spans", full)
        ids = {"rollout_id": taken["rollout_id"], "attempt_id": taken["attempt"]["attempt_id"]}
        status, body = await server.export(_otlp(ids).SerializeToString())
        assert (status, json.loads(body)) == (503, {"detail": "the store's file: database or disk is full"})


async def test_a_large_request_leaves_the_store_to_other_clients() -> None:
    async with _serving() as server:
        taken = await server.store.start_rollout(input={})
        spans = [_span(taken, number, span_id=f"{number:016x}") for number in range(1, 3001)]
        stored, sizes = asyncio.create_task(server.post("/spans/batch", spans)), set()
        while not stored.done():
            await asyncio.sleep(0)
            sizes.add((await server.store.statistics())["total_spans"])
        assert (await stored)[0] == 201
        assert len(sizes) > 10


async def test_a_batch_contains_no_lists() -> None:
    async with _serving() as server:
        requests = [["POST", "/rollouts/search", "{}"], ["GET", "/statistics", ""], ["GET", "/spans", ""]]
        status, replies = await server.post("/batch", [*requests, ["POST", "/waits/rollouts", "{}"]])
        assert (status, [status for status, _ in replies]) == (200, [404, 200, 404, 404])
