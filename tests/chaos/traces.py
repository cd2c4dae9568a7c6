"""Rollouts with tens of thousands of spans: what the store acknowledges it returns, and it answers others meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import external_processes

from chaos.processes import END_S, Process, Processes
from chaos.tally import Tally
from groundwire.adapters.tracing.spans import SpanRecord, TraceLimit
from groundwire.train.rollouts.outcome import final_outcome
from groundwire.train.store.health import check_store
from groundwire.train.store.remote import RemoteStore
from groundwire.train.store.rollout import Outcome, Rollout

__all__ = ["check_spans", "run"]

_SPANS = 30_000
_WAIT_S = 10.0
"""Another client waits no longer, on a busy machine."""


def run(folder: Path, seconds: float, rng: random.Random, tally: Tally) -> None:
    """One rollout after the other, at least one; the store may be killed while its spans are written."""
    end = time.monotonic() + seconds
    with Processes(folder, tally) as processes:
        database, port = str(folder / "store.db"), external_processes.free_port()

        def start() -> Process:
            process = processes.fork("store of long traces", external_processes.store, database, port)
            check_store(f"http://127.0.0.1:{port}", timeout_s=END_S)
            return process

        store = start()
        while not tally.counts["spans of long traces"] or time.monotonic() < end:
            if not processes.check_running(store):
                store = start()
            kill_at = rng.randrange(_SPANS) if rng.random() < 0.3 else None

            def restart(running: Process = store) -> None:
                nonlocal store
                processes.kill(running)
                store = start()

            asyncio.run(_one_rollout(f"http://127.0.0.1:{port}", rng, tally, kill_at, restart))


async def _one_rollout(
    address: str, rng: random.Random, tally: Tally, kill_at: int | None, restart: Callable[[], None]
) -> None:
    limit = TraceLimit(spans=rng.choice([10 * _SPANS, _SPANS // 2]))
    writer, other = RemoteStore(address), RemoteStore(address)
    for client in (writer, other):
        await client.start()
    await writer.enqueue([Rollout(task={"id": "t"}, trace_limit=limit)])
    [rollout] = await writer.dequeue(1)
    attempt_id, sent = rollout.attempts[-1].attempt_id, list[SpanRecord]()
    watching = asyncio.create_task(_watch(other, rollout.rollout_id, tally)) if kill_at is None else None
    while len(sent) < _SPANS:
        if kill_at is not None and len(sent) >= kill_at:
            kill_at = await asyncio.to_thread(restart)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": attempt_id}
        text = "x" * rng.choice([0, 10, 500])
        spans = [
            SpanRecord(
                name=f"n{number}", sequence_id=number, attributes={"text": text}, start_time=1.0, end_time=2.0, **ids
            )
            for number in range(len(sent) + 1, len(sent) + 1 + rng.choice([1, 100, 1000, 5000]))
        ]
        await writer.add_annotations(spans)
        sent += spans
    await writer.end_attempt(rollout.rollout_id, attempt_id, Outcome(reward=1.0), failed=False)
    read = await writer.get(rollout.rollout_id)
    if watching is not None:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    for client in (writer, other):
        await client.stop()
    tally.add("spans of long traces", len(sent))
    check_spans(sent, read, limit, tally)


def check_spans(sent: Sequence[SpanRecord], read: Rollout | None, limit: TraceLimit, tally: Tally) -> None:
    """All spans are read, or the first ones of a rollout that has failed for that."""
    names = [] if read is None else [span.name for span in read.annotations]
    outcome = None if read is None else final_outcome(read)
    if len(sent) <= limit.spans:
        if names != [span.name for span in sent]:
            tally.fault("lost", "spans of a long trace", f"{len(names)} of {len(sent)}")
    elif outcome is None or outcome.failure != "trace_limit" or outcome.reward is not None:
        tally.fault("lost", "the failure of a rollout with too many spans", str(outcome))
    elif names != [span.name for span in sent[: len(names)]] or len(names) > limit.spans:
        tally.fault("lost", "the first spans of a rollout with too many", f"{len(names)} of {limit.spans}")


async def _watch(client: RemoteStore, rollout_id: str, tally: Tally) -> None:
    """Ask the store for little, again and again, and note how long it takes."""
    while True:
        asked = time.monotonic()
        await client.count([rollout_id])
        waited_s = time.monotonic() - asked
        tally.slowest("store beside a long trace", waited_s)
        if waited_s > _WAIT_S:
            tally.fault("hangs", f"a client waits more than {_WAIT_S:g} s while another writes many spans")
        await asyncio.sleep(0.05)
