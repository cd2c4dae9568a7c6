"""Starts the processes of the tracing benchmarks and sends them calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from benchmarks.tracing._process import request_body

START_S = 120.0


@dataclass
class Process:
    """A running process of :mod:`benchmarks.tracing._process`."""

    process: asyncio.subprocess.Process
    ready: dict[str, Any]

    async def ask(self, line: str) -> dict[str, Any]:
        """Send one line, await its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        return await _answer(self.process)

    def cpu_s(self) -> float:
        """CPU seconds of the process and its children so far."""
        root = psutil.Process(self.process.pid)
        return sum(sum(p.cpu_times()[:2]) for p in [root, *root.children(recursive=True)])


@contextlib.asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[Process]:
    """Run one process; it ends when its stdin is closed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.tracing._process",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=1 << 24,
    )
    try:
        yield Process(process, await asyncio.wait_for(_answer(process), START_S))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except asyncio.TimeoutError:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            await process.wait()


async def _answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a benchmark process ended with code {await process.wait()} before it answered")
    return json.loads(line)


@dataclass(frozen=True)
class Load:
    """Measurements of a series of calls."""

    calls: int
    failed: int
    wall_s: float
    median_ms: float

    @property
    def per_s(self) -> float:
        """Calls per second."""
        return self.calls / self.wall_s


async def load(urls: list[str], *, key: str = "none", clients: int, seconds: float, at_most: int = 10**9) -> Load:
    """Make ``clients`` calls at a time over persistent connections; each client uses the URL of one rollout."""
    body = json.dumps(request_body()).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    latencies: list[float] = []
    issued = failed = 0

    async def client(session: aiohttp.ClientSession, url: str) -> None:
        nonlocal issued, failed
        while time.perf_counter() < until and issued < at_most:
            issued += 1
            start = time.perf_counter()
            async with session.post(f"{url}/chat/completions", data=body, headers=headers) as reply:
                await reply.read()
                failed += reply.status != 200
            latencies.append(time.perf_counter() - start)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        until = start + seconds
        await asyncio.gather(*(client(session, urls[i % len(urls)]) for i in range(clients)))
        wall = time.perf_counter() - start
    return Load(len(latencies), failed, wall, statistics.median(latencies) * 1e3)
