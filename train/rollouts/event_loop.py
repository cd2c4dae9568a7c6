"""The event loop of the rollouts, in a thread of its own, which somebody watches.

Agents are somebody else's code. One that blocks stops every rollout, and the servers that they wait for with them; with
a synchronous client it waits for a reply that this loop would have to send. So the loop's signs of life are counted
from outside: its silence is said with the line that blocks, and when it has lasted too long, whoever waits for the loop
waits no more. The thread is a daemon, so a loop that never comes back does not keep the process from ending.
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

from groundwire.tools.paths import PACKAGE
from groundwire.train.rollouts.errors import EventLoopError

__all__ = ["EventLoopThread"]

T = TypeVar("T")
_TICK_S = 1.0
_SAID_S = 5  # imports and large prompts may take a while
_STOP_PATIENCE_S = 3.0
_STOP_S = 30.0
_log = logging.getLogger(__name__)

_LIBRARIES = (PACKAGE, Path(sysconfig.get_path("stdlib")))
_PACKAGES = {"site-packages", "dist-packages"}


class EventLoopThread:
    """Runs ``loop``. After ``patience_s`` seconds without a sign of life whoever waits for it gets the error."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, patience_s: float) -> None:
        self.loop, self._patience_s = loop, patience_s
        self._lost: Future[Any] = Future()
        self._over = threading.Event()
        self._beats = 0
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        """Start the loop, and watch it."""
        self._thread.start()
        threading.Thread(target=self._watch, name="rollouts-watch", daemon=True).start()

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run ``work`` on the loop and wait for it.

        Raises :class:`EventLoopError` where it cannot end, or has not within ``timeout_s`` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return self.wait(future, timeout_s=timeout_s)
        except BaseException:
            future.cancel()
            raise

    def wait(self, future: Future[T], *, timeout_s: float | None = None) -> T:
        """The result of ``future``, which needs the loop to end. Raises as :meth:`call`."""
        wait([future, self._lost], timeout_s, return_when=FIRST_COMPLETED)
        if future.done():
            return future.result()
        self.check()
        raise EventLoopError(f"the rollouts did not end within {timeout_s:g} s")

    def check(self) -> None:
        """Raises :class:`EventLoopError` where the loop is blocked for too long, or gone."""
        if self._lost.done():
            self._lost.result()

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run ``last`` and end. A loop that is blocked is left behind, so this takes a bounded time."""
        self._patience_s = min(self._patience_s, _STOP_PATIENCE_S)
        try:
            if self._lost.done():
                last.close()
            else:
                self.call(last, timeout_s=_STOP_S)
        except EventLoopError as error:
            _log.error("%s", error)
        finally:
            self._over.set()
            self.loop.call_soon_threadsafe(self.loop.stop)
            if not self._lost.done():
                self._thread.join(_STOP_PATIENCE_S)
                if not self._thread.is_alive():
                    self.loop.close()

    def _run(self) -> None:
        self.loop.call_soon(self._beat)
        try:
            while not self._over.is_set():
                try:
                    self.loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    # Raised in a task that an agent started. asyncio hands it to whoever awaits the task, and to the
                    # loop's owner as well; it ends a rollout, and not all of them.
                    continue
        except BaseException as error:
            self._lose(f"the agents' event loop ended: {error!r}")

    def _beat(self) -> None:
        self._beats += 1
        self.loop.call_later(_TICK_S / 2, self._beat)

    def _watch(self) -> None:
        # Ticks are counted and no clock is read: a process that was stopped (Ctrl-Z) was not blocked.
        # Another task is a sign of life, too: a hundred agents that begin at once may each take a moment.
        silent, seen = 0, tuple[Any, ...]()
        while not self._over.wait(_TICK_S) and not self._lost.done():
            now = self._beats, asyncio.current_task(self.loop)
            silent = silent + 1 if now == seen else 0
            seen = now
            if silent * _TICK_S >= self._patience_s:
                self._lose(self._blocked(silent))
            elif silent == _SAID_S:
                _log.error("%s", self._blocked(silent))

    def _blocked(self, ticks: int) -> str:
        return (
            f"the agents' event loop is blocked at {self._place()} for {ticks * _TICK_S:g} s: all of them wait, and so "
            "does the LLM proxy. What blocks has to await an async client, or be an agent that is a plain `def`, which "
            "runs in a thread"
        )

    def _place(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        innermost = frame
        while frame is not None and _is_library(frame):
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return "an unknown place"
        return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"

    def _lose(self, message: str) -> None:
        if not self._lost.done():
            self._lost.set_exception(EventLoopError(message))


def _is_library(frame: FrameType) -> bool:
    """Whether it is no line of an agent's author."""
    file = frame.f_code.co_filename
    path = Path(file).absolute()
    return file.startswith("<") or bool(_PACKAGES & {*path.parts}) or any(map(path.is_relative_to, _LIBRARIES))
