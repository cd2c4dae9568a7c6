"""Requests are batched without being delayed, and each gets its own response."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from groundwire.train.store.connection import RequestBatcher


class _Store:
    """Responds with the path, once ``free`` is set; ``fails`` is its response to a batch."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.fails: int | Exception | None = None
        self.free = asyncio.Event()

    async def send(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        batch = json.loads(body) if path == "/batch" else None
        self.sent.append([each[1] for each in batch] if batch else path)
        await self.free.wait()
        if batch is None:
            return 200, path.encode()
        if isinstance(self.fails, Exception):
            raise self.fails
        if self.fails is not None:
            return self.fails, b"no"
        return 200, json.dumps([(200, each[1]) for each in batch]).encode()


async def _ask(batcher: RequestBatcher, *paths: str, body: bytes = b"{}") -> list[asyncio.Task[tuple[int, bytes]]]:
    asking = [asyncio.create_task(batcher.send("post", path, body)) for path in paths]
    await asyncio.sleep(0.01)
    return asking


async def test_requests_are_sent_at_once_and_those_that_wait_are_batched() -> None:
    store = _Store()
    batcher = RequestBatcher(store.send)
    asking = [*await _ask(batcher, "/0"), *await _ask(batcher, "/1"), *await _ask(batcher, "/2", "/3", "/4")]
    assert store.sent == ["/0", "/1"]
    store.free.set()
    assert [answer for _, answer in await asyncio.gather(*asking)] == [f"/{number}".encode() for number in range(5)]
    assert store.sent == ["/0", "/1", ["/2", "/3", "/4"]]


async def test_a_request_made_at_the_moment_in_which_all_senders_end_is_sent() -> None:
    store = _Store()
    batcher = RequestBatcher(store.send)

    async def ask_again() -> tuple[int, bytes]:
        await batcher.send("post", "/0", b"{}")
        return await batcher.send("post", "/again", b"{}")

    first = asyncio.create_task(ask_again())
    await asyncio.sleep(0.01)
    [second] = await _ask(batcher, "/1")
    store.free.set()
    assert await asyncio.wait_for(first, 600) == (200, b"/again")
    await second


async def test_a_cancelled_request_is_not_sent() -> None:
    store = _Store()
    batcher = RequestBatcher(store.send)
    first = [*await _ask(batcher, "/a"), *await _ask(batcher, "/b")]
    gone, wanted = await _ask(batcher, "/gone", "/wanted")
    gone.cancel()
    store.free.set()
    await asyncio.gather(*first, wanted)
    assert store.sent == ["/a", "/b", "/wanted"]


@pytest.mark.parametrize(("message", "alone"), [(404, True), (413, True), (408, False), (503, False)])
async def test_the_requests_of_a_refused_batch_are_sent_alone(message: int, alone: bool) -> None:
    store = _Store()
    store.fails = message
    store.free.set()
    answers = await asyncio.gather(*await _ask(RequestBatcher(store.send), "/a", "/b"))
    assert answers == ([(200, b"/a"), (200, b"/b")] if alone else [(message, b"no")] * 2)


async def test_a_lost_connection_fails_all_requests_of_a_batch() -> None:
    store = _Store()
    store.fails = ConnectionResetError("gone")
    store.free.set()
    answers = await asyncio.gather(*await _ask(RequestBatcher(store.send), "/a", "/b"), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ConnectionResetError] * 2


async def test_large_requests_are_not_batched() -> None:
    store = _Store()
    store.free.set()
    await asyncio.gather(*await _ask(RequestBatcher(store.send), "/a", "/b", "/c", body=b'"' + b"x" * (3 << 20) + b'"'))
    assert sorted(store.sent) == ["/a", "/b", "/c"]


def test_requests_are_cancelled_when_the_loop_ends() -> None:
    asking: list[asyncio.Task[Any]] = []

    async def leave() -> None:
        asking.extend(await _ask(RequestBatcher(_Store().send), "/a", "/b", "/c"))

    asyncio.run(asyncio.wait_for(leave(), 600))
    assert all(task.cancelled() for task in asking)


@pytest.mark.parametrize(
    ("path", "may"),
    [
        ("/queues/rollouts/dequeue", True),
        ("/rollouts/ro-1/attempts/at-1", True),
        ("/waits/rollouts", False),
        ("/spans/search", False),
        ("/resources/50%25", False),
        ("/resources/ä", False),
    ],
)
async def test_slow_requests_and_escaped_paths_are_not_batched(path: str, may: bool) -> None:
    batcher = RequestBatcher(_Store().send)
    assert batcher.accepts(path) is may
