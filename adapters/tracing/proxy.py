"""The LLM proxy: it stands between any agent and the policy, records every call and changes none.

The URL says which rollout and attempt a call belongs to, so an agent in any language is traced by giving it a base URL.
Replies are passed on byte for byte, streams chunk by chunk, errors with their status. Replies are parsed and stored
afterwards (:mod:`groundwire.adapters.tracing.span_writer`), so tracing costs an agent one local hop, or none if the
policy is in this process.

Only attempts that run may call the policy (:mod:`groundwire.adapters.tracing.open_attempts`).

The proxy runs on one event loop. A request for more than one choice (``n``) is refused, because a conversation can go
on from only one of them, and the others would be samples without a reward.

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
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
from aiohttp import web

from groundwire.adapters.tracing.calls import to_span
from groundwire.adapters.tracing.open_attempts import OpenAttempts
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
    read_exchange,
    read_request,
    traced_request,
)
from groundwire.adapters.tracing.span_writer import PendingSpan, SpansNotStoredError, SpanWriter
from groundwire.adapters.tracing.spans import SpanSink
from groundwire.tools.errors import UserError
from groundwire.tools.http.guard import Guard
from groundwire.tools.http.server import HttpServer
from groundwire.tools.secrets import MIN_LENGTH, masked_values, register_secret

__all__ = ["HostUnusableError", "LLMProxy", "LocalPolicy", "PortInUseError", "ProxyError", "SpansNotStoredError"]

_ROLLOUT = "/rollout/{rollout_id}/attempt/{attempt_id}"
_MAX_REQUEST_BYTES = 16 << 20
_CONNECT_S = 10.0
_BODY_S = 60.0
# Servers close idle connections after 5 s (the default of uvicorn, and so of vLLM): close ours first.
_KEEPALIVE_S = 3.0
_FORWARDED_HEADERS = ("Authorization",)
_RETURNED_HEADERS = ("Content-Type", "Retry-After", "X-Request-Id")


class ProxyError(UserError):
    """The proxy cannot start."""

    exit_code = 1


class HostUnusableError(ProxyError):
    """This machine cannot listen on the address."""

    exit_code = 2


class PortInUseError(ProxyError):
    """Another program listens on the port."""


class LocalPolicy(Protocol):
    """A policy in this process. It answers on the agent's own connection: a second connection, with every id and
    logprob as JSON, was a third of the work of a rollout.
    """

    model_name: str

    async def chat(
        self, request: web.Request, body: dict[str, Any], *, session: str, on_sampled: OnSampled
    ) -> web.StreamResponse:
        """Answer ``body`` on ``request``.

        ``on_sampled`` is called before the agent can know that the reply is complete. If the request is refused, it is
        not called, and the response has the status.
        """
        ...

    async def models(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's list of models."""
        ...


class LLMProxy(HttpServer):
    """Traces every chat completion of every rollout into ``sink``.

    Args:
        sink: where spans are written.
        policy: a policy in this process; the alternative to ``upstreams`` and the options below.
        upstreams: OpenAI base URLs that end in ``/v1``. The list may be replaced while calls are running. All calls of
            a rollout go to one of them, whose prefix cache then holds the growing prompt.
        model: replaces the model's name in requests.
        api_key: replaces the agent's API key, so that agents need not know it. It is removed from replies.
        ids: whether to ask for token ids, which some servers refuse.
        host: the address to listen on.
        port: the port to listen on; 0 takes any free one.
        timeout_s: how long a server may be silent, in seconds.
        drain_timeout_s: how long :meth:`stop` waits for calls and for the store, in seconds.
        token: needed to listen to other machines. Agents need none: the address of their attempt is theirs alone.
    """

    def __init__(
        self,
        *,
        sink: SpanSink,
        policy: LocalPolicy | None = None,
        upstreams: Sequence[str] = (),
        model: str | None = None,
        api_key: str | None = None,
        ids: bool = True,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 600.0,
        drain_timeout_s: float = 30.0,
        token: str | None = None,
    ) -> None:
        super().__init__(host=host, port=port, drain_timeout_s=drain_timeout_s, token=token)
        if policy is not None and upstreams:
            raise TypeError("give either the upstreams or a policy in this process, not both")
        if isinstance(upstreams, str):
            raise TypeError(f"upstreams is a list of base URLs, not one string: [{upstreams!r}]")
        self.upstreams: Sequence[str] = list(upstreams)
        self.model = model
        self._policy, self._sink, self._ids, self._timeout_s = policy, sink, ids, timeout_s
        self._api_key = api_key
        register_secret(api_key)
        self._session: aiohttp.ClientSession
        self._writer: SpanWriter
        self._open_attempts = OpenAttempts(sink.is_open)

    def guard(self) -> Guard:
        """The routes of an attempt need no token."""
        return Guard(token=self.token, public=["/rollout/"], hosts=[self.host])

    def application(self) -> web.Application:
        """The routes of the proxy."""
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        for prefix in (f"{_ROLLOUT}/v1", _ROLLOUT):  # Agent Lightning's own resources leave out the /v1
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", _not_found)
        return app

    async def start(self) -> None:
        """Listen; ``port`` is the real one afterwards. Raises :class:`ProxyError`."""
        if self._runner is not None:
            raise ProxyError(f"the proxy is already running on port {self.port}")
        try:
            await super().start()
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise HostUnusableError(
                    f"cannot listen on {self.host}, which is no address of this machine: give one of its own with "
                    "--proxy-host"
                ) from error
            problems = {
                errno.EADDRINUSE: (PortInUseError, "is in use"),
                errno.EACCES: (ProxyError, "is reserved for root"),
            }
            if error.errno not in problems:
                raise
            kind, problem = problems[error.errno]
            raise kind(
                f"port {self.port} on {self.host} {problem}: give another one with --proxy-port, or leave it out for "
                "any free port"
            ) from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._timeout_s),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )
        self._writer = SpanWriter(self._sink)

    async def stop(self) -> None:
        """Take no more calls, wait for those that are running, write every one, and close.

        Calls still running after ``drain_timeout_s`` are cut off and recorded as failed. Raises
        :class:`SpansNotStoredError` if the store does not accept the calls within the same time.
        """
        if self._runner is None:
            return
        try:
            await super().stop()
            self._open_attempts.close()
            await self._writer.close(timeout_s=self.drain_timeout_s)
        finally:
            await self._session.close()

    def base_url(self, rollout_id: str, attempt_id: str) -> str:
        """The base URL for the agent of an attempt; any OpenAI client takes it."""
        rollout, attempt = quote(rollout_id, safe=""), quote(attempt_id, safe="")
        return f"{self.url}/rollout/{rollout}/attempt/{attempt}/v1"

    def attempt_ended(self, rollout_id: str) -> None:
        """An attempt of the rollout has ended: ask the store before its next call, which is refused if it is late."""
        self._open_attempts.forget(rollout_id)

    async def flush(self, rollout_id: str | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until every call answered so far (of one rollout) is in the store.

        Raises :class:`SpansNotStoredError` if the store refused one, or has not accepted all after ``timeout_s``.
        """
        await self._writer.flush(rollout_id, timeout_s=timeout_s)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        exchange = HttpExchange(
            rollout_id=request.match_info["rollout_id"],
            attempt_id=request.match_info["attempt_id"],
            agent=calling_agent(request.headers),
            started=time.time(),
        )
        try:
            await self._open_attempts.check(exchange.rollout_id, exchange.attempt_id)
        except RefusedError as refused:
            return _refusal(refused)
        pending = self._writer.reserve(exchange.rollout_id, exchange.attempt_id)
        try:
            exchange.request = read_request(await _read_body(request))
            check_one_sample(exchange.request)
            if self._policy is not None:
                return await self._ask_policy(self._policy, request, exchange, pending)
            return await self._forward(request, exchange, pending)
        except RefusedError as refused:
            exchange.status, exchange.error = refused.status, str(refused)
            return _refusal(refused)
        except BaseException as error:  # a cancelled handler, or a fault of ours: the call is recorded all the same
            if not exchange.ended:
                gone = isinstance(error, (asyncio.CancelledError, ConnectionResetError))
                exchange.status = CLIENT_GONE if gone else 500
                exchange.error = (
                    "the client left before the reply was complete" if gone else f"the proxy failed: {error!r}"
                )
            raise
        finally:
            self._finish(exchange, pending)

    async def _ask_policy(
        self, policy: LocalPolicy, request: web.Request, exchange: HttpExchange, pending: PendingSpan
    ) -> web.StreamResponse:
        def on_sampled(sampled: Mapping[str, Any]) -> None:
            exchange.sampled = sampled
            self._finish(exchange, pending)

        body = {**exchange.request, "model": policy.model_name}
        response = await policy.chat(request, body, session=_session_id(exchange), on_sampled=on_sampled)
        if not exchange.ended:  # a refusal
            assert isinstance(response, web.Response)
            exchange.status, exchange.body = response.status, (response.text or "").encode()
        return response

    async def _forward(self, request: web.Request, exchange: HttpExchange, pending: PendingSpan) -> web.StreamResponse:
        url = self._upstream(exchange.rollout_id)
        sent = json.dumps(traced_request(exchange.request, model=self.model, ids=self._ids)).encode()
        headers = {**self._upstream_headers(request), SESSION_HEADER: _session_id(exchange)}
        try:
            async with await self._post(f"{url}/chat/completions", sent, headers) as reply:
                exchange.status = reply.status
                if reply.content_type == "text/event-stream":
                    exchange.streamed = True
                    return await self._relay(request, reply, exchange, pending)
                exchange.body = self._without_key(await reply.read())
                return web.Response(status=reply.status, body=exchange.body, headers=_returned_headers(reply))
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
            # The server had just closed this kept connection. Nothing was sampled, so asking again is safe.
            return await self._session.post(url, data=body, headers=headers)

    async def _relay(
        self, request: web.Request, reply: aiohttp.ClientResponse, exchange: HttpExchange, pending: PendingSpan
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=reply.status, headers=_returned_headers(reply))
        await response.prepare(request)
        received = bytearray()
        try:
            async for data in reply.content.iter_any():
                chunk = self._without_key(data)
                received += chunk
                if has_ended(received, chunk):
                    # Recorded before the client can know that the reply is complete, so that a flush never misses it.
                    exchange.body = bytes(received)
                    self._finish(exchange, pending)
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
            async with self._session.get(f"{url}/models", headers=self._upstream_headers(request)) as reply:
                return web.Response(
                    status=reply.status, body=self._without_key(await reply.read()), headers=_returned_headers(reply)
                )
        except (asyncio.TimeoutError, aiohttp.ClientError) as error:
            return _refusal(RefusedError(502, f"the policy server at {url} did not answer: {error!r}"))

    def _without_key(self, data: bytes) -> bytes:
        """``data`` without the API key: a server may repeat the key that it refuses."""
        key = self._api_key or ""
        return data.replace(key.encode(), b"***") if len(key) >= MIN_LENGTH else data

    def _upstream_headers(self, request: web.Request) -> dict[str, str]:
        headers = {name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return headers

    def _upstream(self, rollout_id: str) -> str:
        if not self.upstreams:
            raise RefusedError(503, "no policy server is set: give the proxy's upstreams at least one base URL")
        return self.upstreams[zlib.crc32(rollout_id.encode()) % len(self.upstreams)].rstrip("/")

    def _finish(self, exchange: HttpExchange, pending: PendingSpan) -> None:
        if not exchange.ended:
            exchange.ended = time.time()
            self._writer.finish(pending, lambda sequence: to_span(read_exchange(exchange, sequence=sequence)))


async def _read_body(request: web.Request) -> bytes:
    try:
        return await asyncio.wait_for(request.read(), _BODY_S)
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(413, f"the request is larger than {_MAX_REQUEST_BYTES >> 20} MiB") from error
    except asyncio.TimeoutError as error:
        raise RefusedError(408, f"the request was not complete after {_BODY_S:g} s") from error


def _session_id(exchange: HttpExchange) -> str:
    return quote(exchange.rollout_id, safe="")


def _refusal(refused: RefusedError) -> web.Response:
    return web.json_response(masked_values(refused.body()), status=refused.status)


async def _not_found(request: web.Request) -> web.StreamResponse:
    return _refusal(
        RefusedError(
            404,
            f"{request.method} {request.path} is not traced: use the base URL of a rollout, "
            f"http://HOST:PORT/rollout/ID/attempt/ID/v1, and its chat/completions (not responses, not completions)",
        )
    )


def _returned_headers(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: reply.headers[name] for name in _RETURNED_HEADERS if name in reply.headers}
