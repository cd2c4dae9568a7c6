"""Agent Lightning's own stores, for tests of the edge. Import it where the package is installed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mongo_wire import FakeMongo, fake_mongo


@asynccontextmanager
async def their_server(store: Any = None, port: int = 0) -> AsyncIterator[str]:
    """Agent Lightning's server of ``store``, or of its store in memory."""
    from agentlightning.store.client_server import LightningStoreServer
    from agentlightning.store.memory import InMemoryLightningStore

    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    store = store or InMemoryLightningStore()
    server = LightningStoreServer(store, host="127.0.0.1", port=port, launch_mode="asyncio")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop()


@asynccontextmanager
async def mongo_store(server: FakeMongo) -> AsyncIterator[Any]:
    """A store in a MongoDB of the test."""
    from groundwire.train.store.mongo import MongoStore

    async with fake_mongo(server) as uri:
        store = await asyncio.to_thread(MongoStore, uri)  # it asks the server, which is on this loop
        yield store
        await store.close()
