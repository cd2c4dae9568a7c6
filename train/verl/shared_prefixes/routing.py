"""Sends LLM calls whose prompts begin alike to the same inference server, which keeps what it computed.

verl's load balancer sends a new key to the server with the fewest open requests, so each server computes almost every
prefix. verl takes this one because ``rollout.router_config_path`` is ``router.yaml`` in this folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cachetools import LRUCache
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from groundwire.train.verl.shared_prefixes.prefixes import DIGITS, PREFIXES, REMEMBERED, prefix_hashes

_MOST_AHEAD = 4  # a server with as many more open requests than the least busy one gets no prompt for its prefix
_LEAST_SHARE = 0.5  # of a prompt's tokens: a shorter known prefix, a system message, is no reason to choose a server


class PrefixRouter(GlobalRequestLoadBalancer):
    """verl's load balancer, but a new key goes to the server that knows most of its prompt, if it is not much busier.

    ``options`` is the content of ``router.yaml``.
    """

    def __init__(self, servers: dict[str, Any], options: Mapping[str, Any]) -> None:
        super().__init__(servers)
        self._known: LRUCache[str, str] = LRUCache(REMEMBERED)  # the last server of prompts with these first hashes

    def require_acquire_fields(self) -> list[str]:
        """What verl's client sends beside the key."""
        return ["prompt_ids"]

    def acquire_server(self, request_id: str, prompt_ids: Sequence[int] = ()) -> tuple[str, Any]:
        """The name and the handle of a server. Raises ``RuntimeError`` if there is none."""
        if self._request_id_to_server.get(request_id) in self._inflight_requests:
            return super().acquire_server(request_id)
        hashes = prefix_hashes(prompt_ids)
        if (known := self._server_that_knows(hashes, len(prompt_ids))) is not None:
            self._request_id_to_server[request_id] = known
        server, handle = super().acquire_server(request_id)
        self._known.update((hashes[:end], server) for end in range(DIGITS, len(hashes) + 1, DIGITS))
        return server, handle

    def _server_that_knows(self, hashes: str, tokens: int) -> str | None:
        """The last server that got the longest known prefix of a prompt."""
        number = len(hashes) // DIGITS
        while number and PREFIXES[number - 1] >= _LEAST_SHARE * tokens:
            if (server := self._known.get(hashes[: number * DIGITS])) in self._inflight_requests:
                ahead = self._inflight_requests[server] - min(self._inflight_requests.values())
                return server if ahead < _MOST_AHEAD else None
            number -= 1
        return None


@dataclass
class _Route:
    """The server of a key, as ``(id, handle)``, and how many calls use it."""

    server: asyncio.Future[tuple[str, Any]]
    calls: int = 0


class KeyedClient(LLMServerClient):
    """verl's client, with one call to its load balancer for all calls with a key that are open at the same time.

    verl's own asks before and after each call, and the one actor that answers handles fewer of these than two GPUs
    need. A server is released when the last open call with its key ends. For servers that stay the same during a step.
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
