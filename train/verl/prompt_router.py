"""Sends LLM calls whose prompts begin alike to the same inference server, which keeps what it computed.

verl's load balancer sends a new key to the server with the fewest open requests, so each server computes almost every
beginning. verl takes this one because ``rollout.router_config_path`` is ``router.yaml`` in this folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cachetools import LRUCache
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from groundwire.train.verl.prefix_hashes import DIGITS, PREFIXES, prefix_hashes

__all__ = ["PromptRouter"]

_REMEMBERED = 100_000
"""Beginnings; a prompt of 900 tokens has 31."""
_MOST_AHEAD = 4
"""A server with as many more open requests than the least busy one gets no prompt for its beginning."""
_LEAST_SHARE = 0.5
"""Of a prompt's tokens: a shorter known beginning, such as a system message, is no reason to choose a server."""


class PromptRouter(GlobalRequestLoadBalancer):
    """verl's load balancer, but a new key goes to the server that knows most of its prompt, if it is not much busier.

    A key stands for calls with one prompt (:mod:`.prompt_affinity`). ``options`` is the content of ``router.yaml``.
    """

    def __init__(self, servers: dict[str, Any], options: Mapping[str, Any]) -> None:
        super().__init__(servers)
        self._known: LRUCache[str, str] = LRUCache(_REMEMBERED)
        """The last server that got a prompt with these first hashes."""

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
        """The last server that got the longest known beginning of a prompt."""
        number = len(hashes) // DIGITS
        while number and PREFIXES[number - 1] >= _LEAST_SHARE * tokens:
            if (server := self._known.get(hashes[: number * DIGITS])) in self._inflight_requests:
                ahead = self._inflight_requests[server] - min(self._inflight_requests.values())
                return server if ahead < _MOST_AHEAD else None
            number -= 1
        return None
