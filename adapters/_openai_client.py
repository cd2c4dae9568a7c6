"""One HTTP client for all rollouts of a backend, and what its errors mean.

Building an OpenAI client with its connection pool costs more than a call; a copy with another base URL does not. The
client follows no proxy settings of the environment and never retries by itself: a retry is a sample that nobody judged.
Its connections are aiohttp's: httpx's own pool looks at every connection for every request, which at a hundred rollouts
is most of an agent's CPU time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
from httpx_aiohttp import AiohttpTransport

from groundwire.adapters._types import AgentError, BackendError, Endpoint, EndpointError, PromptTooLongError, ToolError
from groundwire.adapters.tracing.emitted_spans import count_call
from groundwire.tools.sql import DatabaseError

__all__ = ["Clients", "typed_failures"]

# Servers close idle connections after 5 s (uvicorn's default, and so vLLM's): let go of them first.
_LIMITS = httpx.Limits(max_connections=512, max_keepalive_connections=512, keepalive_expiry=3.0)


class Clients:
    """OpenAI clients over one connection pool; they live on the event loop that used them first."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client: openai.AsyncOpenAI | None = None

    def at(self, endpoint: Endpoint) -> openai.AsyncOpenAI:
        """The client of one rollout."""
        if self._client is None:
            http_client = httpx.AsyncClient(
                transport=AiohttpTransport(limits=_LIMITS, trust_env=False),
                timeout=self._timeout_s,
                trust_env=False,
                event_hooks={"request": [_count_call]},
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


async def _count_call(request: httpx.Request) -> None:
    if request.url.path.endswith("/chat/completions"):
        count_call()


@contextmanager
def typed_failures(endpoint: Endpoint) -> Iterator[None]:
    """Raise what goes wrong inside as the :class:`adapters.BackendError` of the boundary that it crossed."""
    try:
        yield
    except BackendError:
        raise
    except DatabaseError as error:
        raise ToolError(str(error)) from error
    except openai.APIStatusError as error:
        _check_address(error.response.request, endpoint, f"it answered {error.status_code}: {error.message}", error)
        failure = PromptTooLongError if error.code == "context_length_exceeded" else EndpointError
        message = f"the model's endpoint answered {error.status_code}: {error.message}"
        raise failure(message, status=error.status_code) from error
    except (openai.APIError, httpx.TransportError) as error:  # the second: a stream that broke off
        _check_address(_request(error), endpoint, f"no answer: {error}", error)
        raise EndpointError(f"no answer from {endpoint.base_url}: {error}") from error
    except Exception as error:
        if type(error) is openai.OpenAIError and "api_key" in str(error):
            raise AgentError(
                f"the agent's client has no api_key: make it with base_url=endpoint.base_url ({endpoint.base_url} "
                "here) and api_key=endpoint.api_key"
            ) from error
        raise AgentError(f"{type(error).__name__}: {error}") from error


def _request(error: Exception) -> httpx.Request | None:
    try:
        return getattr(error, "request", None)
    except RuntimeError:  # httpx's own have one only once they were sent
        return None


def _check_address(request: httpx.Request | None, endpoint: Endpoint, said: str, error: Exception) -> None:
    """Raise :class:`AgentError` where the agent's client asked somebody else: our endpoint has no part in that."""
    if request is None:
        return
    asked, ours = request.url, httpx.URL(endpoint.base_url)
    same = (asked.scheme, asked.host, asked.port) == (ours.scheme, ours.host, ours.port)
    if same and asked.path.startswith(ours.path.rstrip("/")):
        return
    address = str(asked.copy_with(query=None, fragment=None, userinfo=b""))
    raise AgentError(
        f"the agent's client asked {address}, not its endpoint ({said}): give it base_url=endpoint.base_url, which "
        f"is {endpoint.base_url} here"
    ) from error
