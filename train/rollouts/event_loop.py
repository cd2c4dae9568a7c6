"""The event loop of the rollouts, in a separate, watched thread.

Agents are code of users. An agent that blocks the loop stops all rollouts and the servers that they wait for; with a
synchronous client it waits for a response that this very loop would have to send. So another thread counts the loop's
heartbeats: a blocked loop is logged with the line that blocks it, and after a while callers that wait for the loop
get an error. The thread is a daemon: a loop that stays blocked does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from groundwire.tools.startup import PACKAGE
from groundwire.train.rollouts.errors import EventLoopError

T = TypeVar("T")
_TICK_S = 1.0
_WARN_TICKS = 5  # imports and long prompts may take a few seconds
_STOP_BLOCKED_S = 3.0
_STOP_S = 30.0
_log = logging.getLogger(__name__)

_LIBRARY_FOLDERS = (PACKAGE, Path(sysconfig.get_path("stdlib")))
_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}


class EventLoopThread:
    """Runs ``loop`` in a thread. A loop that is blocked for ``max_blocked_s`` seconds is given up."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, max_blocked_s: float) -> None:
        self.loop, self._max_blocked_s = loop, max_blocked_s
        self._failure: Future[Any] = Future()
        self._stopped = threading.Event()
        self._heartbeats = 0
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        """Start the loop and the thread that watches it."""
        self._thread.start()
        threading.Thread(target=self._watch, name="rollouts-watch", daemon=True).start()

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run ``work`` on the loop and wait for its result.

        Raises :class:`EventLoopError` if the loop is given up, or ``timeout_s`` seconds have passed.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return self.wait(future, timeout_s=timeout_s)
        except BaseException:
            future.cancel()
            raise

    def wait(self, future: Future[T], *, timeout_s: float | None = None) -> T:
        """The result of a ``future`` of the loop. Raises the same errors as :meth:`call`."""
        wait([future, self._failure], timeout_s, return_when=FIRST_COMPLETED)
        if future.done():
            return future.result()
        self.check()
        raise EventLoopError(f"the rollouts did not end within {timeout_s:g} s")

    def check(self) -> None:
        """Raise :class:`EventLoopError` if the loop is given up."""
        if self._failure.done():
            self._failure.result()

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run ``last`` and end, within about ``_STOP_S`` seconds: a blocked loop is left behind."""
        self._max_blocked_s = min(self._max_blocked_s, _STOP_BLOCKED_S)
        try:
            if self._failure.done():
                last.close()
            else:
                self.call(last, timeout_s=_STOP_S)
        except EventLoopError as error:
            _log.error("%s", error)
        finally:
            self._stopped.set()
            self.loop.call_soon_threadsafe(self.loop.stop)
            if not self._failure.done():
                self._thread.join(_STOP_BLOCKED_S)
                if not self._thread.is_alive():
                    self.loop.close()

    def _run(self) -> None:
        self.loop.call_soon(self._heartbeat)
        try:
            while not self._stopped.is_set():
                try:
                    self.loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    # Raised in a task that an agent started: asyncio raises it where the task is awaited and here. It
                    # ends one rollout, not the loop.
                    continue
        except BaseException as error:
            self._give_up(f"the agents' event loop ended: {error!r}")

    def _heartbeat(self) -> None:
        self._heartbeats += 1
        self.loop.call_later(_TICK_S / 2, self._heartbeat)

    def _watch(self) -> None:
        # Ticks are counted instead of reading a clock: a process that was suspended (Ctrl-Z) was not blocked.
        # A change of the current task counts, too: a hundred agents that start together may each take a moment.
        blocked_ticks, last = 0, tuple[Any, ...]()
        while not self._stopped.wait(_TICK_S) and not self._failure.done():
            state = self._heartbeats, asyncio.current_task(self.loop)
            blocked_ticks = blocked_ticks + 1 if state == last else 0
            last = state
            if blocked_ticks * _TICK_S >= self._max_blocked_s:
                self._give_up(self._blocked_message(blocked_ticks))
            elif blocked_ticks == _WARN_TICKS:
                _log.error("%s", self._blocked_message(blocked_ticks))

    def _blocked_message(self, ticks: int) -> str:
        return (
            f"the agents' event loop is blocked at {self._blocking_line()} for {ticks * _TICK_S:g} s: all agents wait, "
            "and so does the LLM proxy. Await an async client there, or make the agent a plain `def`, which runs in a "
            "thread"
        )

    def _blocking_line(self) -> str:
        innermost = frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and _is_library(frame):
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return "an unknown line"
        return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"

    def _give_up(self, message: str) -> None:
        if not self._failure.done():
            self._failure.set_exception(EventLoopError(message))


def _is_library(frame: FrameType) -> bool:
    """Whether the frame is not the code of an agent's author."""
    file = frame.f_code.co_filename
    path = Path(file).absolute()
    in_package = bool(_PACKAGE_FOLDERS & {*path.parts})
    return file.startswith("<") or in_package or any(map(path.is_relative_to, _LIBRARY_FOLDERS))
