"""From a rollout's spans to triplets: our reader beside Agent Lightning's LlmProxyTraceToTriplet.

Both proxies first trace the same calls; each reader then reads the spans of its own proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._results import median_s, record
from benchmarks.tracing._setup import load, started

CALLS_PER_ROLLOUT = 6
ROLLOUTS = 8
PASSES = 50


def main() -> None:
    """Print the table."""
    asyncio.run(_compare())


async def _compare() -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing agentlightning asks the network
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
    best, other = speeds["ours: triplets"], speeds["theirs: triplets"]
    record("spans to triplets", best, unit="calls/s", against="LlmProxyTraceToTriplet", theirs=other)
    print(f"triplets/s: {best / other:.0f}x")


async def _spans() -> tuple[list[Any], list[Any]]:
    """The spans of the same rollouts from each proxy, by rollout."""
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
    """Calls read per second, the median over the passes."""
    for rollout in rollouts:
        assert len(read(rollout)) == CALLS_PER_ROLLOUT, f"{len(read(rollout))} of {CALLS_PER_ROLLOUT} calls were read"
    return CALLS_PER_ROLLOUT * len(rollouts) / median_s(lambda: [read(rollout) for rollout in rollouts], passes=PASSES)


if __name__ == "__main__":
    main()
