"""Starts the processes of the tracing benchmarks and sends them calls."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.tracing._http import Client
from benchmarks.tracing._process import request_body


@dataclass
class Process:
    """A running process of :mod:`benchmarks.tracing._process`; ``ready`` is its first line."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]

    def ask(self, line: str) -> dict[str, Any]:
        """Send one line and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return _read_answer(self.process)

    def cpu_s(self) -> float:
        """CPU seconds of the process and its children so far."""
        root = psutil.Process(self.process.pid)
        return sum(sum(process.cpu_times()[:2]) for process in [root, *root.children(recursive=True)])


@contextmanager
def started(*arguments: str) -> Iterator[Process]:
    """Run one process; it ends when its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.tracing._process", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        yield Process(process, _read_answer(process))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def _read_answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a benchmark process ended with code {process.wait()} before it answered")
    return json.loads(line)


@dataclass(frozen=True)
class Load:
    """Measurements of a series of calls."""

    calls: int
    failed: int
    wall_s: float
    median_ms: float
    cpu_s: float = 0.0
    """CPU time of what was loaded, if it was measured."""

    @property
    def per_s(self) -> float:
        """Calls per second."""
        return self.calls / self.wall_s


def load(
    urls: list[str],
    *,
    key: str = "none",
    clients: int,
    seconds: float,
    at_most: int = 10**9,
    api: str = "chat/completions",
) -> Load:
    """Make ``clients`` calls at a time over persistent connections; each client uses the URL of one rollout."""
    body = json.dumps(request_body(api)).encode()
    issued = 0

    async def run_clients() -> tuple[float, list[Client]]:
        loop, begin = asyncio.get_running_loop(), time.perf_counter()

        def again() -> bool:
            nonlocal issued
            issued += 1
            return issued <= at_most and time.perf_counter() < begin + seconds

        async def client(url: str) -> Client:
            parts = urlsplit(url)
            address = parts.hostname, parts.port
            _, running = await loop.create_connection(lambda: Client(f"{url}/{api}", body, key, again), *address)
            await running.done
            return running

        ended = await asyncio.gather(*(client(urls[i % len(urls)]) for i in range(clients)))
        return time.perf_counter() - begin, ended

    wall_s, ended = asyncio.run(run_clients())
    latencies_s = [latency for each in ended for latency in each.latencies_s]
    failed = sum(each.failed for each in ended)
    return Load(len(latencies_s), failed, wall_s, statistics.median(latencies_s) * 1e3)
