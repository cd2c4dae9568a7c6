"""verl's client of its inference servers, with fewer calls to its load balancer.

verl's client makes two calls to one actor for each LLM call, and the actor handles about two thousand of them a second,
which is less than two GPUs need. Calls with the same key go to the same server anyway (:mod:`.prompt_affinity`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient

__all__ = ["KeyedClient"]


@dataclass
class _Route:
    """The server of a key, as ``(id, handle)``, and how many calls use it."""

    server: asyncio.Future[tuple[str, Any]]
    calls: int = 0


class KeyedClient(LLMServerClient):
    """Asks ``client``'s load balancer for a server when the first call with a key starts.

    It releases the server when the last open call with that key ends. For servers that stay the same during a step.
    """

    def __init__(self, client: LLMServerClient) -> None:
        super().__init__(client.config, client._load_balancer)
        self._routes: dict[str, _Route] = {}

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        if (route := self._routes.get(request_id)) is None:
            acquired = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
            route = self._routes[request_id] = _Route(acquired)
        route.calls += 1
        try:
            return await asyncio.shield(route.server)  # a cancelled call leaves the server to the others
        except BaseException:
            self._leave(request_id)
            raise

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        if request_id is not None:
            self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        route = self._routes[request_id]
        route.calls -= 1
        if not route.calls:
            del self._routes[request_id]
            route.server.add_done_callback(partial(self._release, request_id))

    def _release(self, request_id: str, server: asyncio.Future[tuple[str, Any]]) -> None:
        if not server.cancelled() and server.exception() is None:
            super()._release_server(server.result()[0], request_id=request_id)
