"""Carries OpenTelemetry's context into the threads that an agent starts, so that their LLM calls find their attempt.

As OpenTelemetry's own instrumentation of ``threading`` does, which would need the same version as the SDK that an
application has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry import context
from wrapt import wrap_function_wrapper

__all__ = ["carry_context_into_threads"]


def carry_context_into_threads() -> None:
    """From now on, a thread runs in the context in which it is started, and so does a job of a thread pool.

    A thread that takes jobs from a queue keeps the context of the attempt that started it, for as long as that runs
    (:class:`groundwire.adapters.unmodified.redirection.AttemptEndedError`).
    """
    wrap_function_wrapper("threading", "Thread.start", _start)
    wrap_function_wrapper("concurrent.futures", "ThreadPoolExecutor.submit", _submit)


def _start(start: Any, thread: Any, args: Any, kwargs: Any) -> Any:
    thread.run = _in_present_context(thread.run)
    return start(*args, **kwargs)


def _submit(submit: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    function, *rest = args
    return submit(_in_present_context(function), *rest, **kwargs)


def _in_present_context(function: Callable[..., Any]) -> Callable[..., Any]:
    captured = context.get_current()

    def run(*args: Any, **kwargs: Any) -> Any:
        token = context.attach(captured)
        try:
            return function(*args, **kwargs)
        finally:
            context.detach(token)

    return run
