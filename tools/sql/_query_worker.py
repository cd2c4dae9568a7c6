"""The program of the processes that :mod:`groundwire.tools.sql.processes` starts."""

from __future__ import annotations

import marshal
import os
import resource
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from groundwire.tools.sql.errors import QueryError
from groundwire.tools.sql.query import run_here

__all__ = ["serve"]

# A query normally ends at its deadline by SQLite's own check, which lets the process live.
_KILL_FACTOR, _KILL_MARGIN_S = 1.1, 0.05
# Of each temporary file. A sort can write a gigabyte in a second, and deleting the file takes a part of that time.
_MAX_FILE_BYTES = 256 * 1024 * 1024


def serve(descriptor: int, parent: int) -> None:
    """Answer the queries that arrive, until the other end of the pipe is closed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, whatever it is doing
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error instead
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = _MAX_FILE_BYTES if hard_limit == resource.RLIM_INFINITY else min(_MAX_FILE_BYTES, hard_limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with Connection(descriptor) as pipe:
        try:
            while True:
                path, sql, max_rows, max_bytes, timeout_s = marshal.loads(pipe.recv_bytes())  # noqa: S302 - our parent
                signal.setitimer(signal.ITIMER_REAL, timeout_s * _KILL_FACTOR + _KILL_MARGIN_S)
                answer = marshal.dumps(_answer(path, sql, timeout_s, max_rows, max_bytes))
                signal.setitimer(signal.ITIMER_REAL, 0)
                pipe.send_bytes(answer)
        except (EOFError, ConnectionError):
            return


def _end_with_parent(parent: int) -> None:
    """A killed parent closes the pipe, which nobody reads while a query runs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _answer(*query: Any) -> tuple[Any, ...]:
    try:
        return (None, *run_here(*query, inline=False))
    except QueryError as error:
        return type(error).__name__, str(error)
