"""HTTP with little CPU time, for the two ends of a benchmark: they share the cores with what is measured."""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from urllib.parse import urlsplit

__all__ = ["Client", "Server"]

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class _Connection(asyncio.Protocol, ABC):
    """One message at a time, each with a Content-Length, or without a body."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._data, self._expected = bytearray(), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._expected and (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._data, 0, end)
            self._expected = end + 4 + (int(length[1]) if length else 0)
        if self._expected and len(self._data) >= self._expected:
            message, self._data, self._expected = bytes(self._data), bytearray(), 0
            self.received(message)

    @abstractmethod
    def received(self, message: bytes) -> None:
        """Take a whole message."""


class Server(_Connection):
    """Answers each request with the JSON that ``reply`` makes of its path."""

    def __init__(self, reply: Callable[[str], bytes]) -> None:
        super().__init__()
        self._reply = reply

    def received(self, message: bytes) -> None:
        """Answer a request."""
        body = self._reply(message.split(b" ", 2)[1].decode())
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


class Client(_Connection):
    """Sends a request again and again while ``again`` is true.

    ``latencies_s`` has the time of each reply, ``failed`` counts those without status 200, ``done`` is set at the end.
    """

    def __init__(self, url: str, body: bytes, key: str, again: Callable[[], bool]) -> None:
        super().__init__()
        parts = urlsplit(url)
        self._request = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._again, self._sent = again, 0.0
        self.latencies_s: list[float] = []
        self.failed = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._send()

    def received(self, message: bytes) -> None:
        """Measure a reply and send the next request."""
        self.latencies_s.append(time.perf_counter() - self._sent)
        self.failed += not message.startswith(b"HTTP/1.1 200 ")
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))

    def _send(self) -> None:
        if self._again():
            self._sent = time.perf_counter()
            self.transport.write(self._request)
        elif not self.done.done():
            self.done.set_result(None)
            self.transport.close()
