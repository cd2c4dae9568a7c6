"""Threads for code that may never return: nothing waits for them when the process ends.

``asyncio.to_thread`` takes its threads from a pool. One that hangs keeps its place there, and at the end Python waits
for it. Here each call has a thread of its own, so there are as many as there are calls, and one that hangs is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


def in_thread(function: Callable[[], T], *, name: str) -> Future[T]:
    """Start ``function`` in a daemon thread, with the caller's context variables."""
    future: Future[T] = Future()
    context = copy_context()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = context.run(function)
        except BaseException as error:  # SystemExit, too: it is the caller's, and would end only this thread
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
