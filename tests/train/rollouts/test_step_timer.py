"""Phases sum to the wall time, and no moment counts twice."""

from __future__ import annotations

import asyncio
import time

from groundwire.train.step_timer import PHASES, StepTimer, timed_event_loop


def test_phases_sum_to_the_wall_time() -> None:
    timer = StepTimer()
    timer.split()
    started = time.perf_counter()
    with timer.busy("agent"), timer.busy("sampling"):
        time.sleep(0.02)
    time.sleep(0.01)
    least = time.perf_counter() - started
    seconds = timer.split()
    assert sum(seconds.values()) >= least
    assert set(seconds) == set(PHASES)


def test_a_moment_belongs_to_the_first_busy_phase() -> None:
    timer = StepTimer()
    started = time.perf_counter()
    timer.split()
    with timer.busy("agent"), timer.busy("sampling"):
        time.sleep(0.02)
    seconds = timer.split()
    assert seconds["sampling"] >= 0.02
    assert seconds["agent"] + seconds["sampling"] <= time.perf_counter() - started


def test_an_event_loop_is_busy_while_it_runs_and_not_while_it_waits() -> None:
    timer = StepTimer()
    loop = timed_event_loop(timer)

    async def work() -> None:
        time.sleep(0.05)  # noqa: ASYNC251 -- a busy loop is the point
        await asyncio.sleep(0.5)
        await asyncio.to_thread(time.sleep, 0.5)

    timer.split()
    loop.run_until_complete(work())
    seconds = timer.split()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert seconds["agent"] >= 0.05
    assert seconds["waiting"] > 0.03  # less than it waits: the machine may be busy in between
    assert seconds["sql"] > 0.03
