"""A policy with given replies, for code that runs an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer


@contextmanager
def scripted_policy(replies: Callable[[dict[str, Any]], Reply | str], *, model: str) -> Iterator[str]:
    """The address of a policy in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ScriptedPolicyServer(replies, model=model)
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield server.base_url
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
