"""Graceful shutdown on Ctrl-C and SIGTERM.

A signal interrupts most work at once, such as waiting for rollouts. In a critical section, such as an update, it takes
effect at the section's end; a second signal interrupts that, too.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from groundwire.tools.secrets import say

_DUPLICATE_S = 1.0
"""Signals within this time count once: a parent process that also gets the terminal's Ctrl-C may send it again."""


class GracefulShutdown:
    """Within this context SIGINT and SIGTERM raise ``KeyboardInterrupt``, in critical sections at their end.

    Only the main thread receives signals; in another thread the context has no effect.
    """

    def __init__(self) -> None:
        self.immediate = False
        """Whether a second signal came: no further work may begin."""
        self._signalled_at: float | None = None
        self._section: str | None = None
        self._pending = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> GracefulShutdown:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def critical_section(self, name: str) -> Iterator[None]:
        """Delay a first signal until the block has ended. ``name`` is printed when one comes."""
        self._section = name
        try:
            yield
        except BaseException:  # the program ends with this error instead
            self._pending = False
            raise
        finally:
            self._section = None
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        now, previous = time.monotonic(), self._signalled_at
        if previous is not None and now - previous < _DUPLICATE_S:
            return
        self._signalled_at = now
        if previous is None and self._section is not None:
            self._pending = True
            message = f"stopping after {self._section}; once more: at once, at the last checkpoint"
            say(message, err=True)
            return
        self.immediate = previous is not None
        raise KeyboardInterrupt
