"""One HTTP client for all rollouts of a backend, and the typed failures of its errors.

Building an OpenAI client with a connection pool costs more than a call; copying one with another base URL does not. The
client ignores the proxy settings of the environment. It does not retry, because a retry would be a sample without a
reward. Its connections are aiohttp's: httpx's own pool examines every connection for every request, which takes most of
an agent's CPU time at a hundred rollouts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import httpx
from httpx_aiohttp import AiohttpTransport

from groundwire.adapters._failures import agent_failure, causes
from groundwire.adapters._types import AgentError, BackendError, Endpoint, EndpointError, PromptTooLongError, ToolError
from groundwire.adapters.tracing.emitted_spans import call_headers
from groundwire.tools.sql import DatabaseError

if TYPE_CHECKING:  # it takes a second to import, and an agent need not use it
    import openai

__all__ = ["Clients", "typed_failures"]

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

            http_client = httpx.AsyncClient(
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


@contextmanager
def typed_failures(endpoint: Endpoint) -> Iterator[None]:
    """Raise every error of an agent as the :class:`groundwire.adapters.BackendError` that says what failed."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        for each in causes(error):
            _raise_known(each, endpoint)
        raise agent_failure(error) from error


def _raise_known(error: BaseException, endpoint: Endpoint) -> None:
    """Raise the failure that ``error`` stands for, also behind an exception of the agent's own."""
    if isinstance(error, BackendError):
        raise error
    if isinstance(error, DatabaseError):
        raise ToolError(str(error)) from error
    if "openai" in sys.modules:  # else none of its errors exists
        _raise_openai_error(error, endpoint)
    if isinstance(error, httpx.TransportError):  # httpx's own: a stream that broke off
        _raise_no_answer(error, endpoint)


def _raise_openai_error(error: BaseException, endpoint: Endpoint) -> None:
    import openai

    if isinstance(error, openai.APIStatusError):
        _check_address(error.response.request, endpoint, f"it answered {error.status_code}: {error.message}", error)
        failure = PromptTooLongError if error.code == "context_length_exceeded" else EndpointError
        message = f"the model's endpoint answered {error.status_code}: {error.message}"
        raise failure(message, status=error.status_code) from error
    if isinstance(error, openai.APIError):
        _raise_no_answer(error, endpoint)
    if type(error) is openai.OpenAIError and "api_key" in str(error):
        raise AgentError(
            f"the agent's client has no api_key: make it with base_url=endpoint.base_url ({endpoint.base_url} "
            "here) and api_key=endpoint.api_key"
        ) from error


def _raise_no_answer(error: openai.APIError | httpx.TransportError, endpoint: Endpoint) -> NoReturn:
    try:
        request = getattr(error, "request", None)
    except RuntimeError:  # raised by httpx's errors before the request is sent
        request = None
    if request is not None:
        _check_address(request, endpoint, f"no answer: {error}", error)
    raise EndpointError(f"no answer from {endpoint.base_url}: {error}") from error


def _check_address(request: httpx.Request, endpoint: Endpoint, outcome: str, error: Exception) -> None:
    """Raise :class:`AgentError` if the agent sent ``request`` to another address than its endpoint."""
    sent, expected = request.url, httpx.URL(endpoint.base_url)
    same = (sent.scheme, sent.host, sent.port) == (expected.scheme, expected.host, expected.port)
    if same and sent.path.startswith(expected.path.rstrip("/")):
        return
    address = str(sent.copy_with(query=None, fragment=None, userinfo=b""))
    raise AgentError(
        f"the agent's client asked {address}, not its endpoint ({outcome}): give it base_url=endpoint.base_url, which "
        f"is {endpoint.base_url} here"
    ) from error
