"""Slow queries do not delay quick ones, also of the same client.

The server cannot know who sends a query: one connection may serve a hundred agents, and one program may open a hundred
connections. So queries are separated by their duration. Each runs for at most a quarter of a second in the quick lane.
One that takes longer starts again in the slow lane, which runs few queries at once and lets a limited number wait;
beyond that the server is busy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from groundwire.tools.sql import DatabaseError, QueryError, QueryTimeoutError

_QUICK_S = 0.25
_QUICK_THREADS = 64
_MAX_WAITING_QUICK = 2000
_SLOW_THREADS = max(4, (os.cpu_count() or 1) // 2)
_MAX_WAITING_SLOW = 8 * _SLOW_THREADS

T = TypeVar("T")


class BusyError(QueryError):
    """A slow query cannot run, because too many others do; the agent can write a cheaper one."""


class Lanes:
    """Runs blocking functions in threads. A function gets an event that is set when its caller is gone."""

    def __init__(self) -> None:
        self._quick = anyio.CapacityLimiter(_QUICK_THREADS)
        self._slow = anyio.Semaphore(_SLOW_THREADS)
        self._slow_threads = anyio.CapacityLimiter(_SLOW_THREADS)

    async def run(self, work: Callable[[threading.Event], T]) -> T:
        """Run ``work``, which takes milliseconds, in the quick lane. Raises DatabaseError if too many are waiting."""
        if self._quick.statistics().tasks_waiting >= _MAX_WAITING_QUICK:
            raise DatabaseError(f"{_MAX_WAITING_QUICK} requests are waiting for the server, try again in ten seconds")
        return await _in_thread(work, self._quick)

    async def run_query(self, query: Callable[[threading.Event, float], T], timeout_s: float) -> T:
        """Run ``query``, which gets its time limit, in the quick lane, then in the slow one. Raises :class:`BusyError`.

        It waits for the slow lane for at most ``timeout_s``.
        """
        if timeout_s <= _QUICK_S:
            return await self.run(lambda cancelled: query(cancelled, timeout_s))
        try:
            return await self.run(lambda cancelled: query(cancelled, _QUICK_S))
        except QueryTimeoutError:
            await self._enter_slow_lane(timeout_s)
        try:
            return await _in_thread(lambda cancelled: query(cancelled, timeout_s), self._slow_threads)
        finally:
            self._slow.release()

    async def _enter_slow_lane(self, timeout_s: float) -> None:
        if self._slow.statistics().tasks_waiting < _MAX_WAITING_SLOW:
            with anyio.move_on_after(timeout_s):
                await self._slow.acquire()
                return
        raise BusyError(
            f"the server is busy with other slow queries, and this one takes longer than {_QUICK_S:g} s: write a "
            f"cheaper query, or try again in {timeout_s:g} s"
        )


async def _in_thread(work: Callable[[threading.Event], T], threads: anyio.CapacityLimiter) -> T:
    cancelled = threading.Event()
    try:
        return await anyio.to_thread.run_sync(work, cancelled, abandon_on_cancel=True, limiter=threads)
    except MemoryError as error:  # while opening a connection: not caused by this query
        raise DatabaseError("the server is short of memory, try again in ten seconds") from error
    finally:
        cancelled.set()
