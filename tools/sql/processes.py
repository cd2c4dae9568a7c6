"""Processes for queries that may hold SQLite for long between two checks of the deadline.

SQLite checks a deadline only where its program jumps, never inside a function or the query planner. A query that may
stay there for long runs in a process that a timer of the kernel kills a little after the deadline
(:mod:`groundwire.tools.sql._query_worker`). Its memory is separate, too. A process runs one query at a time and is
reused, because its start takes as long as hundreds of queries.
"""

from __future__ import annotations

import atexit
import marshal
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

__all__ = ["KilledError", "close", "run"]

_MAX_PROCESSES = max(8, os.cpu_count() or 1)
_MAX_IDLE = 2
_CANCEL_CHECK_S = 0.01
_MIN_TIME_S = 0.001

Query = tuple[str, str, int, int]
"""The database's path, the SQL, ``max_rows`` and ``max_bytes``."""


class KilledError(Exception):
    """The process ended before it answered. ``timed_out``: its timer ended it; ``crashed``: SQLite crashed."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the process of the query ended with status {returncode}")
        self.timed_out = returncode == -signal.SIGALRM
        self.crashed = -returncode in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


class _Process:
    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            code = (
                f"import sys; sys.path[:] = {sys.path!r}\n"
                f"from groundwire.tools.sql._query_worker import serve; serve({descriptor}, {os.getpid()})"
            )
            # A session of its own: Ctrl-C in a terminal does not reach it. -S: sys.path is set already.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-S", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes, cancelled: Callable[[], bool] | None) -> Any:
        """The answer to ``request``, or None if ``cancelled`` became true. Raises :class:`KilledError`."""
        try:
            self._pipe.send_bytes(request)
            while not self._pipe.poll(_CANCEL_CHECK_S if cancelled else None):
                if cancelled and cancelled():
                    return None
            return marshal.loads(self._pipe.recv_bytes())  # noqa: S302 - from our own process
        except (EOFError, OSError) as error:
            raise KilledError(self._process.wait()) from error

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Close this copy of a parent's process, in a forked child."""
        self._pipe.close()
        self._process.returncode = 0  # it is not a child of this process, so there is nothing to wait for


class _Pool:
    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(_MAX_PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def run(self, query: Query, deadline: float, cancelled: Callable[[], bool] | None) -> Any:
        while not self._free.acquire(timeout=_CANCEL_CHECK_S):
            if time.perf_counter() > deadline:
                raise TimeoutError
            if cancelled and cancelled():
                return None
        try:
            process, answer = self._pop(), None
            try:
                left_s = max(deadline - time.perf_counter(), _MIN_TIME_S)
                answer = process.ask(marshal.dumps((*query, left_s)), cancelled)
            finally:
                if answer is None or not self._push(process):
                    process.close()
            return answer
        finally:
            self._free.release()

    def _pop(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                process.close()
        return _Process()

    def _push(self, process: _Process) -> bool:
        with self._lock:
            if len(self._idle) == _MAX_IDLE:
                return False
            self._idle.append(process)
            return True

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def forget(self) -> None:
        for process in self._idle:
            process.forget()


_pool = _Pool()


def run(query: Query, deadline: float, cancelled: Callable[[], bool] | None) -> Any:
    """The worker's answer to ``query``, or None if ``cancelled`` became true. ``deadline`` is a time of perf_counter.

    Raises :class:`KilledError`, TimeoutError if no process is free before the deadline, and OSError if none can start.
    """
    return _pool.run(query, deadline, cancelled)


def close() -> None:
    """End the idle processes; the next query starts a new one."""
    _pool.close()


def _drop_pool() -> None:
    global _pool  # noqa: PLW0603
    _pool.forget()
    _pool = _Pool()


os.register_at_fork(after_in_child=_drop_pool)
atexit.register(close)
