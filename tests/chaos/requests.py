"""Random requests, decompression bombs and slow clients against every server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from chaos import servers
from chaos.mutations import Request, gzip_bomb, mutate
from chaos.processes import END_S, Process, Processes
from chaos.tally import Tally

__all__ = ["Server", "fuzz", "run"]

_WAIT_S = 0.3
_CLIENTS, _SLOW_CLIENTS = 6, 100
_BOMB_SHARE = 0.002
_ERROR = 500


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    name: str
    process: Process
    port: int
    probe: Request
    """A valid request, that is answered with a status below 300 at any time."""
    requests: Sequence[Request]
    """Valid requests, to be changed."""
    excluded: Sequence[str] = ()
    """Methods that are not sent."""


def run(folder: Path, seconds: float, rng: random.Random, tally: Tally) -> None:
    """Send requests to the servers, each for the same time."""
    end = time.monotonic() + seconds
    with Processes(folder, tally) as processes:
        started = [start(folder, processes) for start in servers.ALL]
        all_servers = [server for wait in started for server in wait()]
        each_s = max(end - time.monotonic(), seconds / 2) / len(all_servers)
        for server in all_servers:
            asyncio.run(fuzz(server, each_s, rng, tally))
            print(f"  {server.name}: {tally.counts[f'requests: {server.name}']} requests", flush=True)


async def fuzz(server: Server, seconds: float, rng: random.Random, tally: Tally) -> None:
    """Send changed requests with several clients while slow clients hold connections; probe in between."""
    end = time.monotonic() + seconds
    slow = [asyncio.create_task(_slow_client(server, rng)) for _ in range(_SLOW_CLIENTS)]
    try:
        await asyncio.gather(_probe(server, end, tally), *(_client(server, end, rng, tally) for _ in range(_CLIENTS)))
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def _client(server: Server, end: float, rng: random.Random, tally: Tally) -> None:
    while time.monotonic() < end and server.process.status is None:
        request = rng.choice(server.requests)
        if rng.random() < _BOMB_SHARE:
            headers = {**request.headers, "Content-Encoding": rng.choice(["gzip", "identity"])}
            request = replace(request, body=gzip_bomb(start=rng.choice([b"[", b"{", b"\x0a"])), headers=headers)
            tally.add("decompression bombs")
        else:
            request = _mutate(request, rng)
            if request.method in server.excluded:
                continue
        await _send(server, request, tally)


def _mutate(request: Request, rng: random.Random) -> Request:
    """A changed copy. A request of JSON-RPC has its own id: the reply to one of two with the same id is lost."""
    if not isinstance(request.body, dict) or "jsonrpc" not in request.body:
        return mutate(request, rng)
    number = rng.getrandbits(48)
    changed = mutate(replace(request, body={**request.body, "id": number}), rng)
    own = isinstance(changed.body, dict) and changed.body.get("id") == number
    return changed if own else replace(changed, waits=True)


async def _send(server: Server, request: Request, tally: Tally) -> None:
    sent = request.encode()
    try:
        status = await asyncio.wait_for(_status(server.port, sent), _WAIT_S if request.waits else END_S)
    except asyncio.TimeoutError:
        if not request.waits:
            tally.fault("hangs", f"{server.name}: no answer within {END_S:g} s", repr(sent))
        status = None
    except (OSError, ValueError, IndexError):  # closed without an answer
        status = None
    tally.add(f"requests: {server.name}")
    if status is not None:
        tally.add(f"status {status // 100}xx: {server.name}")
        if status == _ERROR:
            kind, path = request.method, request.path[:40].decode(errors="replace")
            tally.fault("status 500", f"{server.name}: {kind} {path}", repr(sent))


async def _status(port: int, sent: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        head = await reader.readline()
        while await reader.read(1 << 16):
            pass
        return int(head.split()[1])
    finally:
        writer.close()


async def _probe(server: Server, end: float, tally: Tally) -> None:
    """A valid request must be answered at any time."""
    while time.monotonic() < end and server.process.status is None:
        started = time.monotonic()
        status: object = None
        with suppress(OSError, IndexError, ValueError, asyncio.TimeoutError):
            status = await asyncio.wait_for(_status(server.port, server.probe.encode()), END_S)
        tally.slowest(server.name, time.monotonic() - started)
        if not isinstance(status, int) or status >= 300:
            tally.fault("hangs", f"{server.name}: status {status} for a valid request")
        await asyncio.sleep(0.5)


async def _slow_client(server: Server, rng: random.Random) -> None:
    """Send one byte after the other."""
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                for byte in rng.choice(server.requests).encode():
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(rng.uniform(0, 2))
            finally:
                writer.close()
        await asyncio.sleep(1)
