"""From a rollout's spans to triplets: our reader and Agent Lightning's LlmProxyTraceToTriplet.

Both proxies first trace the same calls; each reader then reads the spans of its own proxy.
"""

from __future__ import annotations

import tempfile
import time
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
    from agentlightning import LlmProxyTraceToTriplet

    from groundwire.adapters.tracing import calls_from_spans, trajectories, triplets

    with started("upstream") as upstream:
        ours, theirs = (_traced_rollouts(which, upstream.ready["url"]) for which in ("ours", "theirs"))
    readers: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "ours: triplets": (lambda spans: triplets(calls_from_spans(spans), 1.0), ours),
        "ours: trajectories": (lambda spans: trajectories(triplets(calls_from_spans(spans), 1.0)), ours),
        "theirs: triplets": (LlmProxyTraceToTriplet().adapt, theirs),
    }
    speeds = {name: _speed(read, rollouts) for name, (read, rollouts) in readers.items()}
    print(f"{'':20}{'calls/CPU-s':>13}{'spans/rollout':>15}")
    for name, speed in speeds.items():
        print(f"{name:20}{speed:13.0f}{len(readers[name][1][0]):15}")
    best, other = speeds["ours: triplets"], speeds["theirs: triplets"]
    record("spans to triplets", best, unit="calls/CPU-s", against="LlmProxyTraceToTriplet", theirs=other)


def _traced_rollouts(which: str, upstream: str) -> list[list[Any]]:
    """The spans of each rollout, as one of the proxies stored them."""
    from agentlightning.types import Span

    with started("proxy", which, upstream, "") as proxy, tempfile.TemporaryDirectory() as folder:
        for url in proxy.ready["urls"][:ROLLOUTS]:
            load([url], key=proxy.ready["key"], clients=1, seconds=60.0, at_most=CALLS_PER_ROLLOUT)
        path = Path(folder) / "spans"
        proxy.ask(str(path))
        rollouts: dict[str, list[Any]] = {}
        for line in path.read_text("utf-8").splitlines():
            span = Span.model_validate_json(line)
            rollouts.setdefault(span.rollout_id, []).append(span)
    return list(rollouts.values())


def _speed(read: Callable[[Any], Any], rollouts: list[Any]) -> float:
    """Calls read per second of CPU time, which no other program shortens: the median over the passes."""
    for rollout in rollouts:
        assert len(read(rollout)) == CALLS_PER_ROLLOUT, f"{len(read(rollout))} of {CALLS_PER_ROLLOUT} calls were read"
    seconds = median_s(lambda: [read(rollout) for rollout in rollouts], passes=PASSES, clock=time.thread_time)
    return CALLS_PER_ROLLOUT * len(rollouts) / seconds


if __name__ == "__main__":
    main()
