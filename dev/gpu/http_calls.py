"""Sends bodies to a URL, each as often as asked, all at once; prints the seconds, and the CPU seconds of this process.

A process of its own, without torch: ``python -m dev.gpu.http_calls URL FILE TIMES``; FILE has a list of bodies as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import aiohttp


async def send(url: str, bodies: list[bytes], times: int) -> None:
    """Raise ``RuntimeError`` for an answer that is no success."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:

        async def call(body: bytes) -> None:
            async with session.post(url, data=body) as response:
                text = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {text[:300]!r}")

        started, cpu_s = time.monotonic(), time.process_time()
        await asyncio.gather(*(call(body) for body in bodies for _ in range(times)))
        print(time.monotonic() - started, time.process_time() - cpu_s)


if __name__ == "__main__":
    contents = json.loads(Path(sys.argv[2]).read_text())
    asyncio.run(send(sys.argv[1], [json.dumps(body).encode() for body in contents], int(sys.argv[3])))
