"""Listens for connections, and leaves the process files for its own work, however many clients come."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import time
from typing import Any

from groundwire.tools.infrastructure import short_of
from groundwire.tools.machine import has_few_files, shortage

BACKLOG = 1024
"""Connections that wait: a hundred runners connect at the same moment."""

_LAST_PORT = 65535
_REFUSED_S = 2.0  # asyncio tries again after one


class _Listener(socket.socket):
    refused_at = -math.inf

    def accept(self) -> tuple[socket.socket, Any]:
        if has_few_files():
            _Listener.refused_at = time.monotonic()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def listen(host: str, port: int) -> socket.socket:
    """Listen for an event loop of asyncio; port 0 takes any free port. Raises ``OSError``.

    While files are few, new connections wait, which is said once, and :func:`connections_wait` is true.
    """
    if not 0 <= port <= _LAST_PORT:  # getaddrinfo() would take the rest of a division
        raise OSError(errno.EINVAL, f"the last port is {_LAST_PORT}")
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    return _Listener(listener.family, listener.type, listener.proto, listener.detach())


def listen_problem(host: str, port: int, error: BaseException, remedy: str) -> str:
    """Why no server can listen there, and what to do."""
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: stop the server there, or {remedy}"
    return f"cannot listen on {host}, port {port} ({getattr(error, 'strerror', None) or error}): {remedy}"


def connections_wait() -> bool:
    """Whether new connections wait for files, so that a server should keep none without a request."""
    return time.monotonic() - _Listener.refused_at < _REFUSED_S


class AcceptFilter(logging.Filter):
    """For asyncio's logger: that a server cannot accept connections is said once, for whatever time it lasts.

    asyncio tries again each second, up to a thousand times, with a traceback for each, also if the server has stopped.
    The connections wait meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_said = False

    def filter(self, record: logging.LogRecord) -> bool:
        """False for all but the first."""
        error = record.exc_info[1] if record.exc_info else None
        if self._is_said and "_start_serving" in record.msg:
            return False
        if error is None or short_of(error) != "files" or "accept" not in record.msg:
            return True
        if self._is_said:
            return False
        self._is_said = True
        record.msg, record.args, record.exc_info = f"new connections wait: {shortage(error)}", (), None
        return True


logging.getLogger("asyncio").addFilter(AcceptFilter())
