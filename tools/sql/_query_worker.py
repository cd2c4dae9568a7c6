"""The program of the processes that run queries which may hold SQLite for long between two checks of the deadline.

SQLite checks a deadline only where its program jumps, never inside a function or the query planner. So a timer of the
kernel ends this process a little after the deadline. Its memory is separate, too.
"""

from __future__ import annotations

import marshal
import resource
import signal
from typing import Any

from groundwire.tools.sql.errors import QueryError
from groundwire.tools.sql.query import run_here
from groundwire.tools.worker_process import answer_requests, time_limit

__all__ = ["serve"]

# A query normally ends at its deadline by SQLite's own check, which lets the process live.
_KILL_FACTOR, _KILL_MARGIN_S = 1.1, 0.05
# Of each temporary file. A sort can write a gigabyte in a second, and deleting the file takes a part of that time.
_MAX_FILE_BYTES = 256 * 1024 * 1024


def serve(descriptor: int, parent: int) -> None:
    """Answer the queries that arrive."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error instead
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = _MAX_FILE_BYTES if hard_limit == resource.RLIM_INFINITY else min(_MAX_FILE_BYTES, hard_limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
    answer_requests(_answer, descriptor, parent)


def _answer(request: bytes) -> bytes:
    path, sql, max_rows, max_bytes, timeout_s = marshal.loads(request)  # noqa: S302 - from our parent
    answer: tuple[Any, ...]
    with time_limit(signal.ITIMER_REAL, timeout_s * _KILL_FACTOR + _KILL_MARGIN_S):
        try:
            answer = None, *run_here(path, sql, timeout_s, max_rows, max_bytes, inline=False)
        except QueryError as error:
            answer = type(error).__name__, str(error)
        return marshal.dumps(answer)
