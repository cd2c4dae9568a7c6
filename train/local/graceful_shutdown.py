"""When a run may be stopped: Ctrl-C and SIGTERM break off what can be done again, and wait for what cannot.

Waiting for rollouts is broken off at once. An update is not: half of it would be weights that belong to no step. It
goes on to its end, which is said, and the run stops then; who asks once more does not wait.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["GracefulShutdown"]

_SAME_S = 1.0
"""A terminal's Ctrl-C also goes to whatever started the program, which may send it on: twice so soon is once."""


class GracefulShutdown:
    """Within this context SIGINT and SIGTERM raise ``KeyboardInterrupt`` where that does no harm.

    Signals are the main thread's: in another one the context changes nothing.
    """

    def __init__(self) -> None:
        self.at_once = False
        """Whether it was asked for once more: nothing else is begun."""
        self._asked_at: float | None = None
        self._whole = False
        self._owed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> GracefulShutdown:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell starts what is to outlive it
                    self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """The block is done to its end before a stop; ``what`` a person is then told of."""
        self._whole, self._what = True, what
        try:
            yield
        except BaseException:  # which is the reason to stop then
            self._owed = False
            raise
        finally:
            self._whole = False
        if self._owed:
            self._owed = False
            raise KeyboardInterrupt

    def _asked(self, _signal: int, _frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._asked_at
        if before is not None and now - before < _SAME_S:
            return
        self._asked_at = now
        if before is None and self._whole:
            self._owed = True
            print(
                f"stopping after {self._what}; once more: at once, at the last checkpoint", file=sys.stderr, flush=True
            )
            return
        self.at_once = before is not None
        raise KeyboardInterrupt
