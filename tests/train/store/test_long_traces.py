"""A rollout with very many spans: the time to read it grows with their number, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from aiohttp import web
from lightning import mongo_store
from mongo_wire import FakeMongo

from groundwire.adapters.tracing import LLMCall
from groundwire.adapters.tracing.call_writer import CallWriter
from groundwire.adapters.tracing.emitted_spans import Emissions, current_emissions, stored_by
from groundwire.adapters.tracing.spans import SpanRecord, TraceLimit
from groundwire.tools.http.access_token import access_token
from groundwire.tools.http.server import Runner
from groundwire.train.rollouts.outcome import final_outcome
from groundwire.train.store.base import RolloutStore
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.memory import MemoryStore
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.store.server import application
from groundwire.train.store.sqlite import MEMORY


@asynccontextmanager
async def _store(kind: str) -> AsyncIterator[RolloutStore]:
    if kind == "remote":
        async with _remote(LightningStore(MEMORY)) as client:
            yield client
    elif kind == "MongoDB":
        pytest.importorskip("agentlightning")
        pytest.importorskip("pymongo")
        async with mongo_store(FakeMongo()) as mongo, _remote(mongo) as client:
            yield client
    else:
        yield MemoryStore() if kind == "memory" else LightningStore(MEMORY)


@asynccontextmanager
async def _remote(store: Any) -> AsyncIterator[RemoteStore]:
    """A client of ``store`` behind HTTP."""
    runner = Runner(application(store, access_token()))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = RemoteStore(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await client.start()
    try:
        yield client
    finally:
        await client.stop()
        await runner.cleanup()


async def _take(store: RolloutStore, **fields: Any) -> Rollout:
    await store.enqueue([Rollout(task={}, **fields)])
    [rollout] = await store.dequeue(1)
    return rollout


def _spans(rollout: Rollout, count: int, text: str = "") -> list[SpanRecord]:
    fields: dict[str, Any] = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempts[-1].attempt_id}
    fields |= {"attributes": {"text": text}, "start_time": 1.0, "end_time": 2.0}
    return [SpanRecord(name=f"n{number}", sequence_id=number + 1, **fields) for number in range(count)]


def _numbered(span: SpanRecord, number: int) -> SpanRecord:
    return replace(span, sequence_id=number)


class _Steps:
    """Counts what SQLite does, in units of some instructions of its virtual machine."""

    def __init__(self, store: LightningStore) -> None:
        self.count = 0
        store._conn.set_progress_handler(self._note, 20)

    def _note(self) -> int:
        self.count += 1
        return 0


async def _steps_of_reading(client: RemoteStore, steps: _Steps, spans: int, *, numbered: bool) -> int:
    rollout = await _take(client, max_attempts=2)
    await client.add_annotations(_spans(rollout, 300))
    await client.end_attempt(rollout.rollout_id, rollout.attempts[-1].attempt_id, None, failed=True)
    [again] = await client.dequeue(1)
    written = _spans(again, spans)
    await client.add_annotations(written if numbered else [replace(span, sequence_id=7) for span in written])
    before = steps.count
    read = await client.get(rollout.rollout_id)
    assert read is not None
    assert [span.name for span in read.annotations] == [f"n{number}" for number in range(spans)]
    return steps.count - before


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "with one number"])
async def test_the_work_of_reading_a_rollout_grows_with_its_spans_and_not_with_their_square(numbered: bool) -> None:
    store = LightningStore(MEMORY)
    async with _remote(store) as client:
        steps = _Steps(store)
        some, many = [await _steps_of_reading(client, steps, count, numbered=numbered) for count in (1000, 8000)]
    assert many < 12 * some


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "with one number"])
async def test_a_store_of_this_process_reads_a_rollout_in_linear_work_too(numbered: bool) -> None:
    store = LightningStore(MEMORY)
    steps, counts = _Steps(store), list[int]()
    for count in (1000, 8000):
        rollout = await _take(store)
        spans = _spans(rollout, count)
        await store.add_annotations(spans if numbered else [replace(span, sequence_id=7) for span in spans])
        steps.count = 0
        assert await store.get(rollout.rollout_id) is not None
        counts.append(steps.count)
    assert counts[1] < 12 * counts[0]


async def test_a_commit_does_not_write_into_the_stores_file_and_wait_for_the_disk(tmp_path: Path) -> None:
    store, file, go_on = LightningStore(tmp_path / "store.db"), tmp_path / "store.db", Event()
    rollout = await _take(store)
    store._thread.submit(go_on.wait)
    size = file.stat().st_size
    for span in _spans(rollout, 400, "x" * 100_000):
        await store.add_annotations([span])
    assert file.stat().st_size == size
    go_on.set()
    store._thread.shutdown()
    assert file.stat().st_size > size + 30_000_000
    store.close()
    assert os.listdir(tmp_path) == ["store.db"]


@pytest.mark.parametrize("make", [MemoryStore, lambda: LightningStore(MEMORY)], ids=["memory", "sqlite"])
async def test_others_are_served_while_a_long_rollout_is_read(make: Any) -> None:
    store = make()
    rollout = await _take(store)
    await store.add_annotations(_spans(rollout, 2000))
    reading = asyncio.create_task(store.get(rollout.rollout_id))
    served = 0
    while not reading.done():
        assert await store.get(rollout.rollout_id, with_calls=False) is not None
        served += 1
        await asyncio.sleep(0)
    assert len((await reading).annotations) == 2000
    assert served > 1


async def test_pages_after_a_place_and_by_offset_have_the_same_spans() -> None:
    store = LightningStore(MEMORY)
    rollout = await _take(store)
    await store.add_annotations(_spans(rollout, 1700, "x" * 3000))

    async def names(**start: Any) -> list[str]:
        read = list[str]()
        while start:
            page = await store.query_spans(rollout.rollout_id, limit=600, **start)
            read += [span["name"] for span in page["items"]]
            following = {"offset": len(read)} if len(read) < page.get("total", 0) else {}
            start = {"after": page["next"]} if "next" in page else following
        return read

    assert await names(after=0) == await names(offset=0) == [f"n{number}" for number in range(1700)]


async def test_all_spans_are_read_of_a_store_that_knows_no_place_to_begin_after() -> None:
    class Former(LightningStore):
        async def query_spans(self, rollout_id: str, *, after: Any = None, **query: Any) -> Any:
            return await super().query_spans(rollout_id, **query)

    async with _remote(Former(MEMORY)) as client:
        rollout = await _take(client)
        await client.add_annotations(_spans(rollout, 700))
        read = await client.get(rollout.rollout_id)
        assert read is not None
        assert [span.name for span in read.annotations] == [f"n{number}" for number in range(700)]


async def test_an_agent_that_emits_many_spans_from_a_thread_holds_up_no_other_rollout() -> None:
    store = MemoryStore()
    rollout = await _take(store)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempts[-1].attempt_id}
    writer = CallWriter(store, store.add_annotations)
    write = stored_by(writer, **ids)
    begun = 0

    def note(fields: Mapping[str, Any]) -> None:
        nonlocal begun
        write(fields)
        begun += 1

    def emit() -> None:
        with Emissions(note).activate():
            emissions = current_emissions()
            assert emissions is not None
            for number in range(3000):
                emissions.add(f"n{number}", {}, start_time=1.0, end_time=1.0)

    emitting = asyncio.create_task(asyncio.to_thread(emit))
    at_once = before = 0
    while not emitting.done():
        await asyncio.sleep(0)
        at_once, before = max(at_once, begun - before), begun
    await emitting
    await writer.flush()
    assert at_once < 100  # in one turn of the event loop
    read = await store.get(rollout.rollout_id)
    assert read is not None
    assert [span.name for span in read.annotations] == [f"n{number}" for number in range(3000)]


async def test_calls_that_wait_for_numbers_get_them_together() -> None:
    class Counting(MemoryStore):
        reservations = 0

        async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
            self.reservations += 1
            return await super().reserve_sequence_ids(attempts)

    store = Counting()
    rollout = await _take(store)
    writer = CallWriter(store, store.add_annotations)
    for span in _spans(rollout, 1000):
        place = writer.reserve(span.rollout_id, span.attempt_id)
        writer.finish(place, partial(_numbered, span))
    await writer.flush()
    await store.get(rollout.rollout_id)
    assert [span.name for span in rollout.annotations] == [f"n{number}" for number in range(1000)]
    assert store.reservations < 20


_KINDS = pytest.mark.parametrize("kind", ["memory", "sqlite", "remote", "MongoDB"])


@_KINDS
async def test_an_attempt_with_more_spans_than_its_limit_has_failed_and_keeps_the_first(kind: str) -> None:
    async with _store(kind) as store:
        rollout, other = [await _take(store, trace_limit=TraceLimit(spans=3)) for _ in range(2)]
        attempt_id = rollout.attempts[-1].attempt_id
        calls = [
            LLMCall(rollout_id=rollout.rollout_id, attempt_id=attempt_id, sequence=n, prompt_ids=[n]) for n in (1, 2)
        ]
        await store.add_calls([calls[0], calls[0]])  # the same twice is one
        await store.add_annotations(_spans(rollout, 2))
        assert await store.ended([rollout.rollout_id]) == []
        await store.add_calls([calls[1]])
        assert await store.ended([rollout.rollout_id]) == [rollout.rollout_id]
        await store.add_annotations(_spans(rollout, 7))
        await store.add_annotations(_spans(other, 3))
        for one in (rollout, other):  # by a runner that does not know of it
            await store.end_attempt(one.rollout_id, one.attempts[-1].attempt_id, Outcome(reward=1.0), failed=False)
        ended, kept = [await store.get(one.rollout_id) for one in (rollout, other)]
        assert ended is not None
        assert kept is not None
        assert (len(ended.calls), [span.name for span in ended.annotations]) == (1, ["n0", "n1"])
        outcome = final_outcome(ended)
        assert (outcome.status, outcome.reward) == ("trace_limit", None)
        assert outcome.message == "it has more LLM calls and emitted spans than max_spans, 3; the others are lost"
        assert (len(kept.annotations), final_outcome(kept).reward) == (3, 1.0)


@_KINDS
async def test_the_bytes_of_an_attempt_are_limited_too(kind: str) -> None:
    async with _store(kind) as store:
        rollout = await _take(store, trace_limit=TraceLimit(spans=100))
        for span in _spans(rollout, 20, "x" * 100_000):
            await store.add_annotations([span])
        ended = await store.get(rollout.rollout_id)
        assert ended is not None
        assert 8 <= len(ended.annotations) <= 10
        assert final_outcome(ended).message == (
            "its LLM calls and emitted spans are larger than 10 KiB times max_spans, 100; the others are lost"
        )


@_KINDS
async def test_an_attempt_beyond_its_limit_is_tried_again_if_the_rollout_says_so(kind: str) -> None:
    async with _store(kind) as store:
        first = await _take(store, trace_limit=TraceLimit(spans=2, retry=True), max_attempts=2)
        first_id = first.attempts[-1].attempt_id
        late = _spans(first, 4)
        await store.add_annotations(late)
        [again] = await store.dequeue(1)
        assert again.attempts[-1].number == 2
        await store.add_annotations(late)  # of the attempt that has failed
        await store.end_attempt(again.rollout_id, first_id, Outcome(reward=0.5), failed=False)
        await store.add_annotations(_spans(again, 2))
        await store.end_attempt(again.rollout_id, again.attempts[-1].attempt_id, Outcome(reward=1.0), failed=False)
        ended = await store.get(again.rollout_id)
        assert ended is not None
        assert (len(ended.annotations), final_outcome(ended).reward) == (2, 1.0)


async def test_the_spans_of_an_attempt_are_still_counted_after_a_restart(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    rollout = await _take(store, trace_limit=TraceLimit(spans=3))
    await store.add_annotations(_spans(rollout, 2))
    store.close()
    store = LightningStore(tmp_path / "store.db")
    await store.add_annotations(_spans(rollout, 6))
    ended = await store.get(rollout.rollout_id)
    assert ended is not None
    assert (len(ended.annotations), final_outcome(ended).status) == (3, "trace_limit")
    store.close()


async def test_old_rollouts_with_many_spans_are_deleted_in_parts(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    rollout = await _take(store)
    await store.add_annotations(_spans(rollout, 5000))
    await store.end_attempt(rollout.rollout_id, rollout.attempts[-1].attempt_id, None, failed=False)
    left = [5000]
    while store.prune(keep_s=-1):
        left.append((await store.statistics())["total_spans"])
    assert left == [5000, 3000, 1000, 0]
    assert await store.get(rollout.rollout_id) is None
    store.close()
