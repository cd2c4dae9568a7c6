"""From a rollout's spans to training data: our reader and Agent Lightning's LlmProxyTraceToTriplet, on real spans.

Both proxies trace the same calls first; their spans are then read over and over, as a trainer would after each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._results import record
from benchmarks.tracing._setup import load, started

CALLS_PER_ROLLOUT = 6
ROLLOUTS = 8
SECONDS = 2.0


async def main() -> None:
    """Print the table."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing agentlightning asks the network
    from agentlightning import LlmProxyTraceToTriplet

    from groundwire.adapters.tracing import calls_from_spans, trajectories, triplets

    ours, theirs = await _spans()
    adapter = LlmProxyTraceToTriplet()
    readers: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "ours: triplets": (lambda spans: triplets(calls_from_spans(spans), 1.0), ours),
        "ours: trajectories": (lambda spans: trajectories(triplets(calls_from_spans(spans), 1.0)), ours),
        "theirs: triplets": (adapter.adapt, theirs),
    }
    speeds = {name: _speed(read, rollouts) for name, (read, rollouts) in readers.items()}
    print(f"{'':20}{'calls/s':>10}{'spans/rollout':>15}")
    for name, speed in speeds.items():
        print(f"{name:20}{speed:10.0f}{len(readers[name][1][0]):15}")
    record(
        "spans to triplets",
        speeds["ours: triplets"],
        unit="calls/s",
        against="LlmProxyTraceToTriplet",
        theirs=speeds["theirs: triplets"],
    )
    print(f"triplets/s: {speeds['ours: triplets'] / speeds['theirs: triplets']:.0f}x")


async def _spans() -> tuple[list[Any], list[Any]]:
    """The same rollouts as each proxy stored them."""
    async with contextlib.AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(started("upstream"))
        proxies = await asyncio.gather(
            *(
                stack.enter_async_context(started("proxy", which, upstream.ready["url"], ""))
                for which in ("ours", "theirs")
            )
        )
        stored = []
        for proxy in proxies:
            for url in proxy.ready["urls"][:ROLLOUTS]:
                await load([url], key=proxy.ready["key"], clients=1, seconds=60.0, at_most=CALLS_PER_ROLLOUT)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "spans"
                await proxy.ask(str(path))
                stored.append(_by_rollout(await asyncio.to_thread(path.read_text, "utf-8")))
    return stored[0], stored[1]


def _by_rollout(lines: str) -> list[Any]:
    from agentlightning.types import Span

    rollouts: dict[str, list[Any]] = {}
    for line in lines.splitlines():
        span = Span.model_validate_json(line)
        rollouts.setdefault(span.rollout_id, []).append(span)
    return list(rollouts.values())


def _speed(read: Callable[[Any], Any], rollouts: list[Any]) -> float:
    """Calls read a second: the median over the passes that fit in the time."""
    for rollout in rollouts:
        assert len(read(rollout)) == CALLS_PER_ROLLOUT, f"{len(read(rollout))} of {CALLS_PER_ROLLOUT} calls were read"
    passes = []
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        start = time.perf_counter()
        for rollout in rollouts:
            read(rollout)
        passes.append(time.perf_counter() - start)
    return CALLS_PER_ROLLOUT * len(rollouts) / statistics.median(passes)


if __name__ == "__main__":
    asyncio.run(main())
