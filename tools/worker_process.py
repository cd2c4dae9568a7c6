"""Processes for work that may take too long or too much memory, or crash.

Such work cannot be stopped inside of this process. A :class:`WorkerPool` gives it to Python processes, one request at a
time, and reuses them, because a start takes long. A worker's module has a function ``serve(descriptor, parent)``, which
sets the worker's limits and then calls :func:`answer_requests`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

_CHECK_S = 0.01
_PARENT_CHECK_S = 0.25
_TIMERS = {signal.ITIMER_REAL: signal.SIGALRM, signal.ITIMER_PROF: signal.SIGPROF}
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


class WorkerEndedError(Exception):
    """The process ended before it answered. ``timed_out``: by its :func:`time_limit`; ``crashed``: by an error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"its process ended with status {status}")
        self.timed_out = -status in _TIMERS.values()
        self.crashed = -status in _CRASHES


class WorkerPool:
    """At most ``size`` processes that run ``module``, and at most ``max_idle`` of them without a request.

    They start when they are needed, and end with this process. A forked child has none of them, but starts its own.
    """

    def __init__(self, module: str, *, size: int = 1, max_idle: int = 1) -> None:
        self._module, self._size, self._max_idle = module, size, max_idle
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._free = threading.BoundedSemaphore(self._size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def ask(
        self, request: Callable[[], bytes], *, deadline: float = math.inf, cancelled: Callable[[], bool] | None = None
    ) -> bytes | None:
        """A process's answer, or None if ``cancelled`` became true, which ends the process.

        ``request`` is called when a process is free. Raises :class:`WorkerEndedError`, TimeoutError if no process is
        free before ``deadline`` (a time of perf_counter), and OSError if none can start.
        """
        while not self._free.acquire(timeout=_CHECK_S):
            if time.perf_counter() > deadline:
                raise TimeoutError
            if cancelled and cancelled():
                return None
        try:
            worker, answer = self._take(), None
            try:
                answer = worker.ask(request(), cancelled)
            finally:
                with self._lock:
                    is_kept = answer is not None and len(self._idle) < self._max_idle
                    if is_kept:
                        self._idle.append(worker)
                if not is_kept:
                    worker.close()
            return answer
        finally:
            self._free.release()

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                worker.close()
        return _Worker(self._module)

    def close(self) -> None:
        """End the processes without a request; the next request starts a new one."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()


class _Worker:
    def __init__(self, module: str) -> None:
        self._pipe, other_end = Pipe()
        with other_end:
            descriptor = other_end.fileno()
            code = (
                f"import sys; sys.path[:] = {sys.path!r}\n"
                f"from {module} import serve; serve({descriptor}, {os.getpid()})"
            )
            # A session of its own: Ctrl-C in a terminal does not reach it. -S: sys.path is set already.
            self.process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-S", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
            )

    def ask(self, request: bytes, cancelled: Callable[[], bool] | None) -> bytes | None:
        try:
            self._pipe.send_bytes(request)
            while not self._pipe.poll(_CHECK_S if cancelled else None):
                if cancelled and cancelled():
                    return None
            return self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerEndedError(self.process.wait()) from error

    def close(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.wait()


def answer_requests(answer: Callable[[bytes], bytes], descriptor: int, parent: int) -> None:
    """In the worker: answer the requests until the other end of the pipe is closed or the process ``parent`` ends."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with Connection(descriptor) as pipe, contextlib.suppress(EOFError, ConnectionError):
        while True:
            pipe.send_bytes(answer(pipe.recv_bytes()))


def _end_with_parent(parent: int) -> None:
    """A killed parent closes the pipe, which nobody reads during a request."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


def limit_memory(more: int) -> None:
    """In the worker: at most ``more`` bytes beyond the present ones. On Linux; elsewhere there is no limit."""
    sizes = Path("/proc/self/statm")
    if sizes.is_file():
        import resource

        limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextlib.contextmanager
def time_limit(timer: int, seconds: float) -> Iterator[None]:
    """In the worker: the kernel ends the process after ``seconds`` by ``timer``: ITIMER_REAL, or ITIMER_PROF (CPU)."""
    signal.signal(_TIMERS[timer], signal.SIG_DFL)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
