"""Daemon threads, for code that may never return: nothing waits for them, unlike for those of a ThreadPoolExecutor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T], *, name: str) -> Future[T]:
    """Run ``function`` with the caller's context variables in a thread of its own: if it hangs, it delays no other."""
    future: Future[T] = Future()
    call = partial(copy_context().run, function)
    threading.Thread(target=fulfil, args=(future, call), name=name, daemon=True).start()
    return future


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
