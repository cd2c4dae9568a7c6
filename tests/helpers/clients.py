"""A client of OpenAI's API for the agents of tests, whose requests name their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
from httpx_aiohttp import AiohttpTransport

from groundwire.adapters._types import Endpoint
from groundwire.adapters.tracing.emitted_spans import call_headers

if TYPE_CHECKING:  # it takes a second to import, and an agent need not use it
    import openai

__all__ = ["Clients"]

# Servers close idle connections after 5 s (the default of uvicorn, and so of vLLM): close ours first.
_LIMITS = httpx.Limits(max_connections=512, max_keepalive_connections=512, keepalive_expiry=3.0)


class Clients:
    """OpenAI clients with one connection pool, which belongs to the event loop that uses it first."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client: openai.AsyncOpenAI | None = None

    def at(self, endpoint: Endpoint) -> openai.AsyncOpenAI:
        """The client of one rollout."""
        if self._client is None:
            import openai

            http_client: Any = httpx.AsyncClient(  # openai 3's types name httpx2's only
                transport=AiohttpTransport(limits=_LIMITS, trust_env=False),
                timeout=self._timeout_s,
                trust_env=False,
                event_hooks={"request": [_identify]},
            )
            self._client = openai.AsyncOpenAI(
                base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=http_client, max_retries=0
            )
        return self._client.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)

    async def close(self) -> None:
        """Close the connections; a later rollout opens new ones."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()


async def _identify(request: httpx.Request) -> None:
    if request.url.path.endswith("/chat/completions"):
        request.headers.update(call_headers())
