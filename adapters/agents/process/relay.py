"""Sends what clients that were made at the agent's import send to the placeholder's port to the attempt's URL.

Such a client has read its URL before there was an attempt. Hooks on httpx, aiohttp and requests replace the URL of a
request; any other client ends at ``socket.connect``, where the placeholder's port becomes that of a relay in this
process, which replaces the path.
"""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from groundwire.adapters.agents.redirection import note_connection

_MAX_HEAD = 1 << 16
_DROPPED = re.compile(rb"\r\n(?:host|connection|proxy-connection):[^\r\n]*", re.IGNORECASE)
_PIECE = 1 << 16


def swap_port(placeholder: int, base_url: str) -> None:
    """Send the connections of this process to the ``placeholder`` port to the attempt with ``base_url``."""
    relay, url = Relay(base_url), urlsplit(base_url)

    def swapped(original: Any) -> Any:
        def connect(self: socket.socket, address: Any) -> Any:
            if isinstance(address, tuple) and address[:2] == (url.hostname, url.port):
                note_connection()
            elif isinstance(address, tuple) and address[1] == placeholder:
                note_connection()
                address = ("127.0.0.1", relay.port(), *address[2:])
            return original(self, address)

        return connect

    for name in ("connect", "connect_ex"):
        setattr(socket.socket, name, swapped(getattr(socket.socket, name)))


class Relay:
    """Sends requests to the attempt with ``base_url``. A connection carries one request, so that only its head is read.

    It listens from its first use on.
    """

    def __init__(self, base_url: str) -> None:
        self._url = urlsplit(base_url)
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()

    def port(self) -> int:
        """The port on which it listens."""
        with self._lock:
            if self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", 0))
                threading.Thread(target=self.accept, args=(self._listener,), name="relay", daemon=True).start()
            return int(self._listener.getsockname()[1])

    def accept(self, listener: socket.socket) -> None:
        """Serve the connections of a socket; never returns."""
        while True:
            client, _ = listener.accept()
            threading.Thread(target=self._carry, args=(client,), name="relay", daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD:
                piece = client.recv(_PIECE)
                if not piece:
                    return
                head += piece
            with socket.create_connection((self._url.hostname, self._url.port or 80)) as server:
                server.sendall(self._rewritten(head))
                threading.Thread(target=_copy, args=(client, server), name="relay", daemon=True).start()
                _copy(server, client)
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def _rewritten(self, head: bytes) -> bytes:
        start, _, rest = head.partition(b" ")
        path, _, rest = rest.partition(b" ")
        root = self._url.path.rstrip("/").removesuffix("/v1").encode()
        head, _, body = rest.partition(b"\r\n\r\n")
        head = _DROPPED.sub(b"", head)
        host = self._url.netloc.encode()
        return b"%b %b%b %b\r\nHost: %b\r\nConnection: close\r\n\r\n%b" % (start, root, path, head, host, body)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(_PIECE):
            target.sendall(piece)
