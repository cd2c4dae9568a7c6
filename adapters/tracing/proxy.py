"""The LLM proxy: between any agent and the policy, it records every call and changes none.

The rollout and attempt are in the URL, so an agent in any language is traced by giving it a base URL. Replies are
passed on byte for byte, streams chunk by chunk, errors with their status; reading a reply and storing it happen
afterwards (:mod:`groundwire.adapters.tracing.span_writer`), so tracing costs an agent one more local hop and nothing
else; where the policy is in this process, not even that.

One process, one event loop: start it where the store lives. A request for more than one choice (``n``) is refused,
because a conversation can only go on from one of them and the others would be samples that nobody judged.

    UserError
    ├── ProxyError              the proxy cannot start
    │   ├── HostUnusableError   this machine does not have the address
    │   └── PortInUseError      the port is taken
    └── SpansNotStoredError     (span_writer) the store did not accept the spans of some calls
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
from aiohttp import web

from groundwire.adapters.tracing.openai_wire import (
    CLIENT_GONE,
    SESSION_HEADER,
    HttpExchange,
    OnSampled,
    RefusedError,
    calling_agent,
    check_one_sample,
    error_body,
    has_ended,
    read_request,
    traced_request,
)
from groundwire.adapters.tracing.span_writer import PendingSpan, SpansNotStoredError, SpanStore, SpanWriter
from groundwire.tools.errors import UserError

__all__ = ["HostUnusableError", "LLMProxy", "LocalPolicy", "PortInUseError", "ProxyError", "SpansNotStoredError"]

_ROLLOUT = "/rollout/{rollout_id}/attempt/{attempt_id}"
_MAX_REQUEST_BYTES = 64 << 20
_BACKLOG = 1024
_CONNECT_S = 10.0
# Servers close idle connections after 5 s (uvicorn's default, and so vLLM's): let go of them first.
_KEEPALIVE_S = 3.0
_PASSED_ON = ("Authorization",)
_PASSED_BACK = ("Content-Type", "Retry-After", "X-Request-Id")


class ProxyError(UserError):
    """The proxy cannot start."""

    exit_code = 1


class HostUnusableError(ProxyError):
    """This machine cannot listen on the address."""

    exit_code = 2


class PortInUseError(ProxyError):
    """Something else listens on the port."""


class LocalPolicy(Protocol):
    """A policy in this process. It answers on the agent's own connection: a second one, with every id and logprob as
    JSON, was a third of the work of a rollout.
    """

    model_name: str

    async def chat(
        self, request: web.Request, body: dict[str, Any], *, session: str, on_sampled: OnSampled
    ) -> web.StreamResponse:
        """Answer ``body`` on ``request``.

        ``on_sampled`` is called before the agent can know that the reply is complete. A refused request is answered
        with its status, without a call.
        """
        ...

    async def models(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's list of models."""
        ...


class LLMProxy:
    """Trace every chat completion of every rollout into a Lightning store.

    ``upstreams`` are OpenAI base URLs ending in ``/v1``; the list may be replaced while calls are running. A rollout
    keeps to one of them, so its growing prompt stays in that server's prefix cache. ``model``, where given, replaces
    the name that the agent asks for. ``timeout_s`` is how long a server may stay silent. For a server that is somebody
    else's: ``api_key``, where given, replaces the agent's, so that no agent has to know it; without ``ids`` it is not
    asked for token ids, which some refuse. In the place of all these, ``policy`` is one in this process.
    """

    def __init__(
        self,
        *,
        upstreams: Sequence[str] = (),
        policy: LocalPolicy | None = None,
        store: SpanStore,
        model: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 600.0,
        drain_timeout_s: float = 30.0,
        api_key: str | None = None,
        ids: bool = True,
    ) -> None:
        if policy is not None and upstreams:
            raise TypeError("give either the upstreams or a policy in this process, not both")
        if isinstance(upstreams, str):
            raise TypeError(f"upstreams is a list of base URLs, not one string: [{upstreams!r}]")
        self.upstreams: Sequence[str] = list(upstreams)
        self.model = model
        self.host, self.port = host, port
        self._policy, self._store, self._ids = policy, store, ids
        self._authorization = None if api_key is None else f"Bearer {api_key}"
        self._timeout_s, self._drain_timeout_s = timeout_s, drain_timeout_s
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession
        self._writer: SpanWriter

    async def __aenter__(self) -> LLMProxy:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen. Raises :class:`ProxyError`; ``port`` is the real one afterwards."""
        if self._runner is not None:
            raise ProxyError(f"the proxy is already running on port {self.port}")
        import agentlightning.types  # noqa: F401  (seconds of import: now, not in the first call)

        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        for prefix in (f"{_ROLLOUT}/v1", _ROLLOUT):  # Agent Lightning's own resources leave out the /v1
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", _untraced)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=self._drain_timeout_s)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port, backlog=_BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise HostUnusableError(
                    f"cannot listen on {self.host}, which is no address of this machine: give one of its own with "
                    "--proxy-host"
                ) from error
            if error.errno == errno.EACCES:
                raise ProxyError(
                    f"port {self.port} on {self.host} may not be used by this user: give one above 1023 with "
                    "--proxy-port, or leave it out for any that is free"
                ) from error
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortInUseError(
                f"port {self.port} on {self.host} is in use: stop what listens there, give another one with "
                "--proxy-port, or leave it out for any that is free"
            ) from error
        self.port = runner.addresses[0][1]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._timeout_s),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )
        self._writer = SpanWriter(self._store)
        self._runner = runner

    async def stop(self) -> None:
        """Take no more calls, wait for those that are running, write every one, and close.

        Calls still running after ``drain_timeout_s`` are cut off and recorded as failed. Raises
        :class:`SpansNotStoredError` where the store does not take the calls within the same time.
        """
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        try:
            await runner.cleanup()
            await self._writer.close(timeout_s=self._drain_timeout_s)
        finally:
            await self._session.close()

    def base_url(self, rollout_id: str, attempt_id: str) -> str:
        """The base URL that an attempt's agent is given; any OpenAI client takes it."""
        rollout, attempt = quote(rollout_id, safe=""), quote(attempt_id, safe="")
        return f"http://{self.host}:{self.port}/rollout/{rollout}/attempt/{attempt}/v1"

    async def flush(self, rollout_id: str | None = None) -> None:
        """Wait until every call that was answered so far (of one rollout) is in the store.

        Raises :class:`SpansNotStoredError` where the store refused one for good.
        """
        await self._writer.flush(rollout_id)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        exchange = HttpExchange(
            rollout_id=request.match_info["rollout_id"],
            attempt_id=request.match_info["attempt_id"],
            agent=calling_agent(request.headers),
            started=time.time(),
        )
        ticket = self._writer.reserve(exchange.rollout_id, exchange.attempt_id)
        try:
            exchange.request = read_request(await request.read())
            check_one_sample(exchange.request)
            if self._policy is not None:
                return await self._ask(self._policy, request, exchange, ticket)
            return await self._forward(request, exchange, ticket)
        except RefusedError as refused:
            exchange.status, exchange.error = refused.status, str(refused)
            return _response(refused)
        except BaseException as error:  # a cancelled handler, or a fault of ours: the call is recorded all the same
            if not exchange.ended:
                gone = isinstance(error, (asyncio.CancelledError, ConnectionResetError))
                exchange.status = CLIENT_GONE if gone else 500
                exchange.error = (
                    "the client left before the reply was complete" if gone else f"the proxy failed: {error!r}"
                )
            raise
        finally:
            self._finish(exchange, ticket)

    async def _ask(
        self, policy: LocalPolicy, request: web.Request, exchange: HttpExchange, ticket: PendingSpan
    ) -> web.StreamResponse:
        def on_sampled(sampled: Mapping[str, Any]) -> None:
            exchange.sampled = sampled
            self._finish(exchange, ticket)

        body = {**exchange.request, "model": policy.model_name}
        response = await policy.chat(request, body, session=_session(exchange), on_sampled=on_sampled)
        if not exchange.ended:  # a refusal
            assert isinstance(response, web.Response)
            exchange.status, exchange.body = response.status, (response.text or "").encode()
        return response

    async def _forward(self, request: web.Request, exchange: HttpExchange, ticket: PendingSpan) -> web.StreamResponse:
        url = self._upstream(exchange.rollout_id)
        sent = json.dumps(traced_request(exchange.request, model=self.model, ids=self._ids)).encode()
        try:
            headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
            if self._authorization is not None:
                headers["Authorization"] = self._authorization
            headers[SESSION_HEADER] = _session(exchange)
            async with await self._post(f"{url}/chat/completions", sent, headers) as reply:
                exchange.status = reply.status
                if reply.content_type == "text/event-stream":
                    exchange.streamed = True
                    return await self._relay(request, reply, exchange, ticket)
                exchange.body = await reply.read()
                return web.Response(status=reply.status, body=exchange.body, headers=_headers_back(reply))
        except asyncio.TimeoutError as error:
            raise RefusedError(504, f"the policy server at {url} was silent for {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise RefusedError(
                502, f"the policy server at {url} did not answer: {error or type(error).__name__}"
            ) from error

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        try:
            return await self._session.post(url, data=body, headers=headers)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                raise
            # A kept connection that the server had just closed. Nothing was sampled, so asking again is safe.
            return await self._session.post(url, data=body, headers=headers)

    async def _relay(
        self, request: web.Request, reply: aiohttp.ClientResponse, exchange: HttpExchange, ticket: PendingSpan
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=reply.status, headers=_headers_back(reply))
        await response.prepare(request)
        received = bytearray()
        try:
            async for chunk in reply.content.iter_any():
                received += chunk
                if has_ended(received, chunk):
                    # Recorded before the client can know that the reply is complete, so that a flush never misses it.
                    exchange.body = bytes(received)
                    self._finish(exchange, ticket)
                await response.write(chunk)
        except (asyncio.TimeoutError, aiohttp.ClientError) as error:
            if isinstance(error, aiohttp.ClientConnectionResetError):  # writing to a client that left
                raise
            exchange.error = f"the policy server broke off its stream: {error!r}"
            event = json.dumps(error_body(exchange.error, kind="upstream_error", status=502))
            await response.write(f"data: {event}\n\n".encode())
        exchange.body = bytes(received)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._policy is not None:
            return await self._policy.models(request)
        url = self._upstream(request.match_info.get("rollout_id", ""))
        try:
            async with self._session.get(f"{url}/models") as reply:
                return web.Response(status=reply.status, body=await reply.read(), headers=_headers_back(reply))
        except (asyncio.TimeoutError, aiohttp.ClientError) as error:
            return _response(RefusedError(502, f"the policy server at {url} did not answer: {error!r}"))

    def _upstream(self, rollout_id: str) -> str:
        if not self.upstreams:
            raise RefusedError(503, "no policy server is set: give the proxy's upstreams at least one base URL")
        return self.upstreams[zlib.crc32(rollout_id.encode()) % len(self.upstreams)].rstrip("/")

    def _finish(self, exchange: HttpExchange, ticket: PendingSpan) -> None:
        if not exchange.ended:
            exchange.ended = time.time()
            self._writer.finish(ticket, exchange)


def _session(exchange: HttpExchange) -> str:
    return quote(exchange.rollout_id, safe="")


def _response(refused: RefusedError) -> web.Response:
    return web.json_response(refused.body(), status=refused.status)


async def _untraced(request: web.Request) -> web.StreamResponse:
    return _response(
        RefusedError(
            404,
            f"{request.method} {request.path} is not traced: use the base URL of a rollout, "
            f"http://HOST:PORT/rollout/ID/attempt/ID/v1, and its chat/completions (not responses, not completions)",
        )
    )


def _headers_back(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: reply.headers[name] for name in _PASSED_BACK if name in reply.headers}
