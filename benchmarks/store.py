"""Rollouts per second through a store over HTTP, and the cost of its history: our durable store and ``agl store``.

A runner only makes the requests of a rollout: it enqueues and takes it, gets eight numbers, adds eight spans of 1 kB,
and updates it. These are 19 requests with Agent Lightning's client. Our own client sends numbers and spans in batches.

    python -m benchmarks.store [speed] [history]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks._processes import our_store, store_process
from benchmarks._results import record

SPANS = 8
SECONDS, PASSES = 4.0, 3
CLIENTS, RUNNERS = 2, (1, 16, 128)
HISTORY, MARKS = 20_000, 4
PAYLOAD = "x" * 1000
CONTEXT = multiprocessing.get_context("fork")


def main() -> None:
    """Print the tables."""
    import agentlightning  # noqa: F401  (once, before the clients are forked)

    parts = {"speed": speed, "history": history}
    for name in sys.argv[1:] or parts:
        parts[name]()


def speed() -> None:
    """Rollouts per second by number of runners, each as soon as it is measured; the stores take turns."""
    their_command = [str(Path(sys.executable).with_name("agl")), "store", "--host", "127.0.0.1", "--log-level", "ERROR"]
    print(f"{'rollouts/s (server ms)':32}{'runners':>8}", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        store_process(their_command) as theirs,
        store_process(our_store(folder)) as ours,
    ):
        ways = {
            "agl store": (theirs, False),
            "durable store": (ours, False),
            "durable store, our client": (ours, True),
        }
        for runners in RUNNERS:
            passes = [{way: _rate(*server, runners) for way, server in ways.items()} for _ in range(PASSES)]
            other = median(each["agl store"][0] for each in passes)
            for way in ways:
                rate, cpu_ms = (median(each[way][part] for each in passes) for part in (0, 1))
                print(f"{way:32}{runners:8}{rate:10.1f} ({cpu_ms:4.1f}){rate / other:8.1f}x", flush=True)
                if way != "agl store":
                    record(f"{way}, {runners} runners", rate, unit="rollouts/s", against="agl store", theirs=other)


def _rate(server: tuple[str, psutil.Process], batches: bool, runners: int) -> tuple[float, float]:
    """Rollouts per second, and the server's CPU milliseconds per rollout. Raises what a client raises."""
    url, process = server
    shares = [len(range(i, runners, CLIENTS)) for i in range(min(CLIENTS, runners))]
    cpu_s = sum(process.cpu_times()[:2])
    with ProcessPoolExecutor(len(shares), mp_context=CONTEXT) as clients:
        results = list(clients.map(_client, repeat(url), shares, repeat(batches)))
    cpu_s = sum(process.cpu_times()[:2]) - cpu_s
    return sum(count / seconds for count, seconds in results), 1000 * cpu_s / sum(count for count, _ in results)


def _client(url: str, runners: int, batches: bool) -> tuple[int, float]:
    return asyncio.run(_run_rollouts(url, runners, batches))


async def _run_rollouts(url: str, runners: int, ours: bool) -> tuple[int, float]:
    from agentlightning import LightningStoreClient

    from groundwire.tools.http.access_token import access_token
    from groundwire.train.store.remote import RemoteStore

    client: Any = RemoteStore(url) if ours else LightningStoreClient(url.replace("://", f"://x:{access_token()}@"))
    if ours:
        await client.start()
    rollout = _rollout if ours else _their_rollout
    started = time.perf_counter()

    async def run(worker: str) -> int:
        count = 0
        while time.perf_counter() < started + SECONDS:
            await rollout(client, worker)
            count += 1
        return count

    counts = await asyncio.gather(*(run(f"{os.getpid()}-{n}") for n in range(runners)))
    seconds = time.perf_counter() - started
    await (client.stop() if ours else client.close())
    return sum(counts), seconds


async def _rollout(store: Any, worker: str) -> Any:
    from groundwire.train.store.rollout import Rollout

    await store.enqueue([Rollout(task={"question": "?"})])
    [rollout] = await store.dequeue(1, worker)
    pair = (rollout.rollout_id, rollout.attempts[-1].attempt_id)
    numbers = await store.reserve_sequence_ids([pair] * SPANS)
    await store.add_annotations([_span(pair, number) for number in numbers])
    await store.end_attempt(*pair, None, failed=False)
    return rollout


def _span(pair: tuple[str, str], number: int) -> Any:
    from groundwire.adapters.tracing.spans import SpanRecord

    return SpanRecord(
        name="call",
        rollout_id=pair[0],
        attempt_id=pair[1],
        sequence_id=number,
        attributes={"payload": PAYLOAD},
        start_time=time.time(),
        end_time=time.time(),
    )


async def _their_rollout(store: Any, worker: str) -> None:
    from agentlightning.types import Span, SpanCoreFields, TraceStatus

    await store.enqueue_rollout({"question": "?"})
    attempted = await store.dequeue_rollout(worker)
    pair = (attempted.rollout_id, attempted.attempt.attempt_id)
    for _ in range(SPANS):
        number = await store.get_next_span_sequence_id(*pair)
        fields = SpanCoreFields(
            name="call",
            attributes={"payload": PAYLOAD},
            status=TraceStatus(status_code="OK"),
            start_time=time.time(),
            end_time=time.time(),
        )
        span = Span.from_core_fields(fields, rollout_id=pair[0], attempt_id=pair[1], sequence_id=number)
        await store.add_span(span)
    await store.update_attempt(*pair, status="succeeded")


def history() -> None:
    """Memory, and CPU time of a rollout and of two queries, while the durable store fills."""
    process = CONTEXT.Process(target=lambda: asyncio.run(_fill()))
    process.start()
    process.join()


async def _fill() -> None:
    from groundwire.train.store.lightning_store import LightningStore

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        store = LightningStore(path)
        print(f"\n{'rollouts':>10}{'RSS MB':>10}{'file MB':>10}{'rollout ms':>12}{'spans ms':>10}{'queue ms':>10}")
        for mark in range(1, MARKS + 1):
            rollout_ms = await _cpu_ms(lambda: _rollout(store, "w"), times=HISTORY // MARKS)
            last = await _rollout(store, "w")
            spans_ms = await _cpu_ms(lambda id=last.rollout_id: store.get(id))  # type: ignore[misc]
            queue_ms = await _cpu_ms(lambda: store.unfinished("run"))
            rss, size = psutil.Process().memory_info().rss >> 20, path.stat().st_size >> 20
            done = mark * HISTORY // MARKS
            record(f"durable store, {done:,} rollouts of {SPANS} spans: resident memory", rss, unit="MB")
            record(f"durable store, {done:,} rollouts of {SPANS} spans: CPU for one more", rollout_ms, unit="ms")
            print(f"{done:10}{rss:10}{size:10}{rollout_ms:12.2f}{spans_ms:10.2f}{queue_ms:10.2f}", flush=True)
        store.close()


async def _cpu_ms(call: Any, times: int = 50) -> float:
    started = time.process_time()
    for _ in range(times):
        await call()
    return 1000 * (time.process_time() - started) / times


if __name__ == "__main__":
    main()
