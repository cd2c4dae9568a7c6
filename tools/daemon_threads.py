"""Threads for code that may never return: nothing waits for them when the process ends.

Python waits at its end for each thread of a ``ThreadPoolExecutor``, and so of ``asyncio.to_thread``. Those here are
daemons, and are left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["DaemonThreads", "fulfil", "in_thread"]

T = TypeVar("T")


def in_thread(function: Callable[[], T], *, name: str) -> Future[T]:
    """Start ``function`` in a thread of its own, with the caller's context variables.

    There are as many threads as calls, so one that hangs takes no other's place.
    """
    future: Future[T] = Future()
    call = partial(copy_context().run, function)
    threading.Thread(target=fulfil, args=(future, call), name=name, daemon=True).start()
    return future


class DaemonThreads(ThreadPoolExecutor):
    """``count`` threads that take calls in turn. A ``ThreadPoolExecutor`` in name: an event loop takes nothing else."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._count, self._started = count, 0
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run the call in the next thread that is free."""
        future: Future[T] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._serve, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when they have nothing left to do. Does not wait, whatever ``wait`` says."""
        for _ in range(self._started):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            fulfil(*call)
            del call  # it may hold much, and the next may be long in coming


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    """Give ``future`` what ``call`` returns or raises, unless it was cancelled: what a thread is started with."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # SystemExit, too: it is the caller's, and would end only this thread
        future.set_exception(error)
    else:
        future.set_result(result)
