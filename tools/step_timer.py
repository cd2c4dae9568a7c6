"""Where a step's time goes: every moment is given to exactly one part, so that the parts sum up to the wall time.

The engine samples in one thread while agents run on an event loop in another, so adding up each part's own seconds
would count some moments twice. Here each part says when it is busy, and a moment belongs to the first busy part in
:data:`PHASES`. What belongs to none is waiting.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from groundwire.tools.daemon_threads import DaemonThreads

__all__ = ["PHASES", "StepTimer", "timed_event_loop"]

PHASES = ("update", "sampling", "sql", "reward", "agent", "waiting")


class StepTimer:
    """Attributes wall time to parts; callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = dict.fromkeys(PHASES, 0)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()

    def enter(self, part: str) -> None:
        """``part`` is busy from now on (counted: it may be entered several times at once)."""
        self._switch(part, 1)

    def leave(self, part: str) -> None:
        """One entry into ``part`` ended."""
        self._switch(part, -1)

    @contextmanager
    def busy(self, part: str) -> Iterator[None]:
        """``part`` is busy within the block."""
        self.enter(part)
        try:
            yield
        finally:
            self.leave(part)

    def split(self) -> dict[str, float]:
        """Seconds of each part since the last lap; they sum up to the wall time between the two."""
        with self._lock:
            self._account()
            seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
            return seconds

    def _switch(self, part: str, change: int) -> None:
        with self._lock:
            self._account()
            self._busy[part] += change

    def _account(self) -> None:
        now = time.perf_counter()
        part = next((name for name in PHASES if self._busy[name] > 0), "waiting")
        self._seconds[part] += now - self._since
        self._since = now


class _TimedSelector(selectors.DefaultSelector):
    """A selector whose loop counts as busy with agents whenever it is not waiting for events."""

    def __init__(self, clock: StepTimer) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        self._clock.leave("agent")
        try:
            return super().select(timeout)
        finally:
            self._clock.enter("agent")


class _TimedExecutor(DaemonThreads):
    """The threads in which queries run: what agents hand to ``asyncio.to_thread`` is SQL."""

    def __init__(self, clock: StepTimer) -> None:
        super().__init__(16)
        self._clock = clock

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def timed() -> Any:
            with self._clock.busy("sql"):
                return fn(*args, **kwargs)

        return super().submit(timed)


def timed_event_loop(clock: StepTimer) -> asyncio.AbstractEventLoop:
    """An event loop that tells ``clock`` when it runs, and when its threads run."""
    clock.enter("agent")
    loop = asyncio.SelectorEventLoop(_TimedSelector(clock))
    loop.set_default_executor(_TimedExecutor(clock))
    return loop
