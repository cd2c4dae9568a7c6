"""Rollouts a second through a store over HTTP, and what its history costs: our durable store beside ``agl store``.

A runner does nothing but the store's work of a rollout: one enqueued, one taken, eight numbers, eight spans of 1 kB,
one update, 19 requests in all, by Agent Lightning's own client; and the same as our runners do it, with numbers and
spans in batches. ``python -m benchmarks.bench_store [speed|history]``.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks._results import record
from benchmarks._store_process import store_process

SPANS = 8
SECONDS = 4.0
PASSES = 3
CLIENTS = 2
RUNNERS = (1, 16, 128)
HISTORY, MARKS = 20_000, 4
PAYLOAD = "x" * 1000
CONTEXT = multiprocessing.get_context("fork")


def main() -> None:
    """Print the tables."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import agentlightning  # noqa: F401  (once, before the clients are forked)

    wanted = sys.argv[1:] or ["speed", "history"]
    if "speed" in wanted:
        speed()
    if "history" in wanted:
        history()


def speed() -> None:
    """Rollouts a second, by runners; the makes take turns."""
    their_command = [str(Path(sys.executable).with_name("agl")), "store", "--host", "127.0.0.1", "--log-level", "ERROR"]
    with tempfile.TemporaryDirectory() as folder:
        our_command = [sys.executable, "-m", "train.store", "--path", f"{folder}/store.db"]
        with store_process(their_command) as theirs, store_process(our_command) as ours:
            ways = {
                "agl store": (theirs, False),
                "durable store": (ours, False),
                "durable store, our client": (ours, True),
            }
            print(f"{'rollouts/s (server ms)':28}" + "".join(f"{n:>10} runners" for n in RUNNERS))
            found: dict[str, list[float]] = {way: [] for way in ways}
            cost: dict[str, list[float]] = {way: [] for way in ways}
            for runners in RUNNERS:
                passes: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
                for _ in range(PASSES):
                    for way, (server, batches) in ways.items():
                        passes[way].append(_rate(server, runners, batches))
                for way, results in passes.items():
                    found[way].append(median(rate for rate, _ in results))
                    cost[way].append(median(ms for _, ms in results))
            for way in ways:
                cells = zip(found[way], cost[way], strict=True)
                print(f"{way:28}" + "".join(f"{rate:10.1f} ({ms:4.1f})" for rate, ms in cells))
            for way in list(ways)[1:]:
                for runners, rate, rival in zip(RUNNERS, found[way], found["agl store"], strict=True):
                    record(f"{way}, {runners} runners", rate, unit="rollouts/s", against="agl store", theirs=rival)
                ratios = zip(found[way], found["agl store"], strict=True)
                print(f"{way + ', times':28}" + "".join(f"{a / b:10.1f}x      " for a, b in ratios))


def _rate(server: tuple[str, psutil.Process], runners: int, batches: bool) -> tuple[float, float]:
    """Rollouts a second, and the server's CPU milliseconds for one."""
    url, process = server
    share = [len(range(i, runners, CLIENTS)) for i in range(min(CLIENTS, runners))]
    before, queue = sum(process.cpu_times()[:2]), CONTEXT.Queue()
    clients = [CONTEXT.Process(target=_client, args=(url, count, batches, queue)) for count in share]
    for client in clients:
        client.start()
    results = [queue.get() for _ in clients]
    for client in clients:
        client.join()
    done = sum(count for count, _ in results)
    cpu = sum(process.cpu_times()[:2]) - before
    return sum(count / seconds for count, seconds in results), 1000 * cpu / done


def _client(url: str, runners: int, batches: bool, queue: Any) -> None:
    queue.put(asyncio.run(_work(url, runners, batches)))


async def _work(url: str, runners: int, batches: bool) -> tuple[int, float]:
    from agentlightning import LightningStoreClient

    from groundwire.train.store.client import StoreClient

    client = StoreClient(url) if batches else LightningStoreClient(url)
    if isinstance(client, StoreClient):
        await client.start()
    started = time.perf_counter()
    until = started + SECONDS

    async def work(worker: str) -> int:
        count = 0
        while time.perf_counter() < until:
            await _rollout(client, worker, batches)
            count += 1
        return count

    counts = await asyncio.gather(*(work(f"{os.getpid()}-{n}") for n in range(runners)))
    seconds = time.perf_counter() - started
    await client.close()
    return sum(counts), seconds


async def _rollout(store: Any, worker: str, batches: bool) -> Any:
    await store.enqueue_rollout({"question": "?"})
    attempted = await store.dequeue_rollout(worker)
    pair = (attempted.rollout_id, attempted.attempt.attempt_id)
    if batches:
        numbers = await store.get_many_span_sequence_ids([pair] * SPANS)
        await store.add_many_spans([_span(pair, number) for number in numbers])
    else:
        for _ in range(SPANS):
            await store.add_span(_span(pair, await store.get_next_span_sequence_id(*pair)))
    await store.update_attempt(*pair, status="succeeded")
    return attempted


def _span(pair: tuple[str, str], number: int) -> Any:
    from agentlightning.types import Span, SpanCoreFields, TraceStatus

    fields = SpanCoreFields(
        name="call",
        attributes={"payload": PAYLOAD},
        status=TraceStatus(status_code="OK"),
        start_time=time.time(),
        end_time=time.time(),
    )
    return Span.from_core_fields(fields, rollout_id=pair[0], attempt_id=pair[1], sequence_id=number)


def history() -> None:
    """Memory, and what a rollout and a few queries cost, while the durable store fills."""
    process = CONTEXT.Process(target=lambda: asyncio.run(_fill()))
    process.start()
    process.join()


async def _fill() -> None:
    from groundwire.train.store.sqlite import SqliteLightningStore

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        store = SqliteLightningStore(path)
        print(f"\n{'rollouts':>10}{'RSS MB':>10}{'file MB':>10}{'rollout ms':>12}{'spans ms':>10}{'queue ms':>10}")
        for mark in range(1, MARKS + 1):
            started = time.process_time()
            for _ in range(HISTORY // MARKS):
                attempted = await _rollout(store, "w", True)
            rollout_ms = 1000 * (time.process_time() - started) / (HISTORY // MARKS)
            spans_ms = await _cost(lambda id=attempted.rollout_id: store.query_spans(id))  # type: ignore[misc]
            queue_ms = await _cost(lambda: store.query_rollouts(status_in=["queuing", "running"]))
            rss = psutil.Process().memory_info().rss >> 20
            size = path.stat().st_size >> 20
            done = mark * HISTORY // MARKS
            record(f"durable store, {done:,} rollouts of {SPANS} spans: resident memory", rss, unit="MB")
            record(f"durable store, {done:,} rollouts of {SPANS} spans: CPU for one more", rollout_ms, unit="ms")
            print(f"{done:10}{rss:10}{size:10}{rollout_ms:12.2f}{spans_ms:10.2f}{queue_ms:10.2f}", flush=True)
        store.close()


async def _cost(query: Any, times: int = 50) -> float:
    started = time.process_time()
    for _ in range(times):
        await query()
    return 1000 * (time.process_time() - started) / times


if __name__ == "__main__":
    main()
