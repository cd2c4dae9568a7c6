"""The connections of an attempt: where its clients reach it, and what it does not have in common with others.

A client that was made at the agent's import has read its URL before there was an attempt: a placeholder's. Hooks on
httpx, aiohttp and requests replace the URL of a request; any other client ends at ``socket.connect`` or in uvloop,
where the placeholder's port becomes that of a relay in this process, which replaces the path.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import socket
import struct
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from groundwire.adapters.agents.changes import wrap
from groundwire.adapters.agents.process.folders import NEW_MOUNTS, NEW_NETWORK, enter
from groundwire.adapters.agents.redirection import note_connection

_DROPPED = re.compile(rb"\r\n(?:host|connection|proxy-connection):[^\r\n]*", re.IGNORECASE)
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41


_relay: Relay | None = None  # where the present attempt's connections go


def send_to(base_url: str) -> None:
    """Send what is connected to the placeholder port to the attempt with ``base_url`` from now on."""
    global _relay  # noqa: PLW0603
    _relay = Relay(base_url)


def swap_port(placeholder: int) -> None:
    """Let :func:`send_to` replace the port ``placeholder``. To change classes is cheap only before the fork."""

    def swapped(host: Any, port: Any) -> tuple[Any, Any]:
        if _relay is not None and (port == placeholder or (host, port) == _relay.address):
            note_connection()
        if _relay is not None and port == placeholder != _relay.address[1]:
            return "127.0.0.1", _relay.port()
        return host, port

    def connect(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        (address,) = args
        if isinstance(address, tuple) and len(address) > 1:
            address = (*swapped(*address[:2]), *address[2:])
        return wrapped(address)

    def create(wrapped: Any, loop: Any, args: Any, kwargs: Any) -> Any:
        def created(protocol: Any, host: Any = None, port: Any = None, **others: Any) -> Any:
            return wrapped(protocol, *swapped(host, port), **others)

        return created(*args, **kwargs)

    for name in ("connect", "connect_ex"):
        wrap("socket", f"socket.{name}", connect)
    wrap("uvloop", "Loop.create_connection", create)


class Relay:
    """Sends requests to the attempt with ``base_url``. A connection carries one request, so that only its head is read.

    It listens from its first use on.
    """

    def __init__(self, base_url: str) -> None:
        self._url = urlsplit(base_url)
        self.address = self._url.hostname, self._url.port
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()

    def port(self) -> int:
        """The port on which it listens."""
        with self._lock:
            if self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", 0))
                self.serve().put(self._listener)
            return int(self._listener.getsockname()[1])

    def serve(self) -> queue.SimpleQueue[socket.socket]:
        """Start to serve the socket that is put into the queue, from the network of the caller."""
        sockets: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

        async def accept() -> None:
            server = await asyncio.start_server(self._carry, sock=sockets.get())
            await server.serve_forever()

        threading.Thread(target=lambda: asyncio.run(accept()), name="relay", daemon=True).start()
        return sockets

    async def _carry(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, asyncio.LimitOverrunError):
            head = self._rewritten(await client.readuntil(b"\r\n\r\n"))
            server, request = await asyncio.open_connection(self._url.hostname, self._url.port or 80)
            request.write(head)
            body = asyncio.create_task(_copy(client, request))
            await _copy(server, reply)
            body.cancel()
            request.close()
        reply.close()

    def _rewritten(self, head: bytes) -> bytes:
        method, path, rest = head.removesuffix(b"\r\n\r\n").split(b" ", 2)
        root = self._url.path.rstrip("/").removesuffix("/v1").encode()
        rest, host = _DROPPED.sub(b"", rest), self._url.netloc.encode()
        return b"%b %b%b %b\r\nHost: %b\r\nConnection: close\r\n\r\n" % (method, root, path, rest, host)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await source.read(1 << 16):
            target.write(piece)
            await target.drain()


def seal(port: int, base_url: str) -> str:
    """Give this thread a network in which nothing but the attempt is reached, on ``port`` of its loopback interface.

    Returns the attempt's URL there. A thread that keeps the present network relays, so this one has to be alone.
    Raises ``OSError`` if the system does not allow it.
    """
    enter(NEW_MOUNTS)  # which an ordinary user needs to enter while there is one thread
    sockets = Relay(base_url).serve()
    if not enter(NEW_NETWORK):
        raise OSError("this system allows no network namespaces")
    from fcntl import ioctl

    with socket.socket() as any_socket:
        ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP_AND_RUNNING))
    sockets.put(socket.create_server(("127.0.0.1", port), backlog=128))
    return f"http://127.0.0.1:{port}/v1"


def hang_up() -> None:
    """Make each inherited TCP connection one whose peer has hung up: siblings would read each other's replies."""
    if not os.path.isdir("/proc/self/fd"):
        return
    ours, theirs = socket.socketpair()
    theirs.close()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            number = int(name)
            if number > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as inherited:
                    if inherited.family in (socket.AF_INET, socket.AF_INET6):
                        inherited.getpeername()  # raises for one that listens or is not connected
                        os.dup2(ours.fileno(), number)
    ours.close()
