"""Dynamic sampling (DAPO, Yu et al. 2025): groups without a gradient teach nothing, so other tasks replace them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from groundwire.train.rollouts.collector import RolloutCollector
from groundwire.train.store.rollout import Rollout

__all__ = ["groups_to_start", "sample_groups"]

_RECENT_STEPS = 5
"""Steps whose share of groups with a gradient is expected of the next step."""


def groups_to_start(metrics: Sequence[Mapping[str, Any]], *, wanted: int, most: int) -> int:
    """How many groups are expected to give ``wanted`` that differ, at most ``most``. ``metrics``: the earlier steps."""
    lines = [line for line in metrics[-_RECENT_STEPS:] if "groups_used" in line]
    sampled, used = (sum(line[name] for line in lines) for name in ("groups", "groups_used"))
    if not sampled:
        return min(most, wanted)
    return min(most, math.ceil(wanted * sampled / used)) if used else most


async def sample_groups(
    collector: RolloutCollector,
    groups: Iterable[Sequence[Rollout]],
    *,
    first: int,
    wanted: int,
    teaches: Callable[[Sequence[Rollout]], bool],
    deadline_s: float,
    on_end: Callable[[], None] = lambda: None,
) -> list[Rollout]:
    """Run groups until ``wanted`` of them have a gradient, or no group is left; returns all their rollouts.

    ``teaches`` tells whether the results of a group have one: with most settings, if their rewards differ.

    The first ``first`` groups start at once. A further one starts as soon as the running groups cannot be enough. So
    which groups run depends on the rewards alone, not on the order in which rollouts end. After ``deadline_s`` seconds
    none starts, and those that run end as in :meth:`RolloutCollector.run`.
    """
    deadline = time.monotonic() + deadline_s
    waiting = iter(groups)
    started: list[asyncio.Task[list[Rollout]]] = []
    running: set[asyncio.Task[list[Rollout]]] = set()
    teaching = 0
    try:
        while True:
            while len(started) < first or teaching + len(running) < wanted:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or (group := next(waiting, None)) is None:
                    break
                started.append(asyncio.ensure_future(collector.run(group, deadline_s=left_s, on_end=on_end)))
                running.add(started[-1])
            if not running:
                return [result for task in started for result in task.result()]
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            teaching += sum(teaches(task.result()) for task in ended)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
