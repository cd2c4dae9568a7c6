"""Splits a training step's wall time into phases. Every moment counts for exactly one phase.

The engine samples in one thread while agents run on an event loop in another, so phases overlap and their own
durations would add up to more than the wall time. Each moment is therefore attributed to the first busy phase in
:data:`PHASES`, and to ``waiting`` if no phase is busy.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from groundwire.tools.daemon_threads import in_thread

PHASES = ("update", "sampling", "sql", "reward", "agent", "waiting")
_THREADS = 16


class StepTimer:
    """Attributes wall time to phases. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = dict.fromkeys(PHASES, 0)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Mark ``phase`` as busy. Entries are counted, so a phase may be entered several times at once."""
        self._change(phase, 1)

    def leave(self, phase: str) -> None:
        """End one entry into ``phase``."""
        self._change(phase, -1)

    @contextmanager
    def busy(self, phase: str) -> Iterator[None]:
        """Mark ``phase`` as busy within the block."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave(phase)

    def split(self) -> dict[str, float]:
        """Seconds of each phase since the last split. They sum to the wall time between the two splits."""
        with self._lock:
            self._attribute()
            seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
            return seconds

    def current(self) -> str:
        """The phase for which this moment counts."""
        return next((name for name in PHASES if self._busy[name] > 0), "waiting")

    def _change(self, phase: str, entries: int) -> None:
        with self._lock:
            self._attribute()
            self._busy[phase] += entries

    def _attribute(self) -> None:
        """Add the time since the last change to the first busy phase."""
        now = time.perf_counter()
        self._seconds[self.current()] += now - self._since
        self._since = now


class _TimedSelector(selectors.DefaultSelector):
    """A selector that counts its event loop as busy with agents, except while it waits for events."""

    def __init__(self, timer: StepTimer) -> None:
        super().__init__()
        self._timer = timer

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        self._timer.leave("agent")
        try:
            return super().select(timeout)
        finally:
            self._timer.enter("agent")


class _TimedExecutor(ThreadPoolExecutor):
    """The threads of ``asyncio.to_thread``. Agents run SQL queries in them, so their work counts as ``sql``.

    They are daemons, for which Python does not wait at exit. An event loop accepts only a ``ThreadPoolExecutor``.
    """

    def __init__(self, timer: StepTimer) -> None:
        super().__init__()
        self._timer, self._slots = timer, threading.Semaphore(_THREADS)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def call() -> Any:
            with self._slots, self._timer.busy("sql"):
                return fn(*args, **kwargs)

        return in_thread(call, name="sql")


def timed_event_loop(timer: StepTimer) -> asyncio.AbstractEventLoop:
    """An event loop that reports to ``timer`` when it runs and when its threads run."""
    timer.enter("agent")
    loop = asyncio.SelectorEventLoop(_TimedSelector(timer))
    loop.set_default_executor(_TimedExecutor(timer))
    return loop
