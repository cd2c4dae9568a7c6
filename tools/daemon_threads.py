"""Threads for code that may never return.

Python waits at exit for the threads of a ``ThreadPoolExecutor``, and so for those of ``asyncio.to_thread``. The threads
here are daemons: nothing waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T], *, name: str) -> Future[T]:
    """Run ``function`` in a new thread, with the caller's context variables.

    Each call has its own thread, so a call that hangs does not delay others.
    """
    future: Future[T] = Future()
    call = partial(copy_context().run, function)
    threading.Thread(target=fulfil, args=(future, call), name=name, daemon=True).start()
    return future


class DaemonThreads(ThreadPoolExecutor):
    """``count`` threads that share a queue of calls. An event loop accepts only a ``ThreadPoolExecutor``."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._count, self._started = count, 0
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run the call in the next free thread."""
        future: Future[T] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._serve, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when the queue is empty. Never waits, whatever ``wait`` is."""
        for _ in range(self._started):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            fulfil(*call)
            del call  # free its arguments before waiting for the next call


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    """Set the result or the exception of ``call`` on ``future``, unless it was cancelled before."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except StopIteration as error:  # an asyncio future cannot hold it
        raised = RuntimeError(f"it raised {error!r}")
        raised.__cause__ = error
        future.set_exception(raised)
    except BaseException as error:  # SystemExit as well: it concerns the caller, not this thread
        future.set_exception(error)
    else:
        future.set_result(result)
