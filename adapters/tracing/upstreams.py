"""The policy servers behind the proxy, which are asked over HTTP.

Chat completions are passed on byte for byte, streams chunk by chunk, errors with their status; the replies for other
APIs are translated. Nothing is parsed that need not be: replies are read for their spans afterwards.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import pydantic_core
from aiohttp import web

from groundwire.adapters.tracing.wire.call import ChatCall, WireCall
from groundwire.adapters.tracing.wire.completions import CompletionsCall
from groundwire.adapters.tracing.wire.exchange import (
    UNREADABLE,
    EventReader,
    HttpExchange,
    as_chat,
    error_message,
    has_ended,
    parse_reply,
)
from groundwire.adapters.tracing.wire.request import SESSION_HEADER, RefusedError, traced_request
from groundwire.tools.secrets import MIN_LENGTH, register_secret

_CONNECT_S = 10.0
# Servers close idle connections after 5 s (the default of uvicorn, and so of vLLM): close ours first.
_KEEPALIVE_S = 3.0
_OK = 200
_EVENTS = "text/event-stream"
_RETURNED_HEADERS = ("Content-Type", "Retry-After", "X-Request-Id")


class Upstreams:
    """OpenAI-compatible servers. The arguments are those of :class:`groundwire.adapters.tracing.proxy.LLMProxy`."""

    def __init__(
        self, urls: Sequence[str], *, model: str | None, api_key: str | None, ids: bool, timeout_s: float
    ) -> None:
        self.urls: Sequence[str] = list(urls)
        self.model = model
        self._api_key, self._ids, self._timeout_s = api_key, ids, timeout_s
        register_secret(api_key)
        self._session: aiohttp.ClientSession

    def start(self) -> None:
        """Make the connection pool, on the running event loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._timeout_s),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def answer(
        self, request: web.Request, call: WireCall, exchange: HttpExchange, *, session: str, record: Callable[[], None]
    ) -> web.StreamResponse:
        """Answer ``call`` on ``request`` with the reply of a server, which ``exchange`` gets.

        ``record`` is called before the agent can know that a stream is complete, so that a flush never misses it.
        Raises :class:`RefusedError` if there is no answer.
        """
        url = self._url(exchange.rollout_id)
        sent = pydantic_core.to_json(traced_request(call.chat, model=self.model, ids=self._ids))
        path = call.api if isinstance(call, CompletionsCall) else ChatCall.api
        headers = {**self._headers(request), SESSION_HEADER: session}
        try:
            async with await self._post(f"{url}/{path}", sent, headers) as reply:
                exchange.status = reply.status
                if reply.content_type == _EVENTS:
                    exchange.streamed = True
                    return await self._stream(request, call, reply, exchange, record)
                exchange.body = self._without_key(await reply.read())
                body = exchange.body if isinstance(call, ChatCall) else _translated(call, exchange)
                return web.Response(status=reply.status, body=body, headers=_returned_headers(reply))
        except asyncio.TimeoutError as error:
            raise RefusedError(504, f"the policy server at {url} was silent for {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            if exchange.streamed:  # the agent left
                raise
            raise RefusedError(
                502, f"the policy server at {url} did not answer: {error or type(error).__name__}"
            ) from error

    async def forward(
        self, request: web.Request, path: str, body: Mapping[str, Any] | None = None
    ) -> web.StreamResponse:
        """A server's response for ``path``, to a GET request or to a POST request of ``body``, as it is.

        Raises :class:`RefusedError` if there is no answer.
        """
        url, headers = self._url(request.match_info.get("rollout_id", "")), self._headers(request)
        method, data = "GET", None
        if body is not None:
            method, data = "POST", pydantic_core.to_json({**body, "model": self.model or body.get("model")})
        try:
            async with self._session.request(method, f"{url}/{path}", data=data, headers=headers) as reply:
                return web.Response(
                    status=reply.status, body=self._without_key(await reply.read()), headers=_returned_headers(reply)
                )
        except (asyncio.TimeoutError, aiohttp.ClientError) as error:
            raise RefusedError(502, f"the policy server at {url} did not answer: {error!r}") from error

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        try:
            return await self._session.post(url, data=body, headers=headers)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # The server had just closed this kept connection. Nothing was sampled, so asking again is safe.
            return await self._session.post(url, data=body, headers=headers)

    async def _stream(
        self,
        request: web.Request,
        call: WireCall,
        reply: aiohttp.ClientResponse,
        exchange: HttpExchange,
        record: Callable[[], None],
    ) -> web.StreamResponse:
        """Pass a stream on: a chat completion as it is, others in the format of the call's API."""
        as_it_is = isinstance(call, ChatCall)
        headers = _returned_headers(reply) if as_it_is else {"Content-Type": _EVENTS, "Cache-Control": "no-cache"}
        response = web.StreamResponse(status=reply.status, headers=headers)
        await response.prepare(request)
        reader, received = EventReader(), bytearray()
        try:
            async for data in reply.content.iter_any():
                chunk = self._without_key(data)
                received += chunk
                sent = chunk if as_it_is else b"".join(call.events(_checked(event)) for event in reader.feed(data))
                if reader.ended or (as_it_is and has_ended(received, chunk)):
                    exchange.body = bytes(received)
                    record()
                    sent += b"" if as_it_is else call.end()
                if sent:
                    await response.write(sent)
                if reader.ended:
                    break
            else:
                if not as_it_is:
                    raise RefusedError(502, "the policy server's stream ended before the reply was complete")
        except RefusedError as refused:
            exchange.error = str(refused)
            await response.write(call.error_event(refused))
        except (asyncio.TimeoutError, aiohttp.ClientError, *UNREADABLE) as error:
            await response.write(call.error_event(_broken_off(error, exchange)))
        finally:
            exchange.body = bytes(received)
        await response.write_eof()
        return response

    def _without_key(self, data: bytes) -> bytes:
        """``data`` without the API key: a server may repeat the key that it refuses."""
        key = self._api_key or ""
        return data.replace(key.encode(), b"***") if len(key) >= MIN_LENGTH else data

    def _headers(self, request: web.Request) -> dict[str, str]:
        if self._api_key is None and "Authorization" in request.headers:
            return {"Authorization": request.headers["Authorization"]}
        key = request.headers.get("X-Api-Key") if self._api_key is None else self._api_key  # of Anthropic's clients
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _url(self, rollout_id: str) -> str:
        if not self.urls:
            raise RefusedError(503, "no policy server is set: give the proxy's upstreams at least one base URL")
        return self.urls[zlib.crc32(rollout_id.encode()) % len(self.urls)].rstrip("/")


def _broken_off(error: Exception, exchange: HttpExchange) -> RefusedError:
    if isinstance(error, aiohttp.ClientConnectionResetError):  # writing to a client that left
        raise error
    exchange.error = f"the policy server broke off its stream: {error!r}"
    return RefusedError(502, exchange.error)


def _checked(chunk: dict[str, Any]) -> dict[str, Any]:
    """``chunk``, unless it reports an error."""
    if "error" in chunk:
        raise RefusedError(502, error_message(json.dumps(chunk).encode()))
    return chunk


def _translated(call: WireCall, exchange: HttpExchange) -> bytes:
    if exchange.status != _OK:
        return json.dumps(call.error(RefusedError(exchange.status, error_message(exchange.body)))).encode()
    try:
        exchange.reply = as_chat(parse_reply(exchange.body))
        return json.dumps(call.reply(exchange.reply or {})).encode()
    except UNREADABLE as error:
        raise RefusedError(502, f"the policy server's reply cannot be read: {error!r}") from error


def _returned_headers(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: reply.headers[name] for name in _RETURNED_HEADERS if name in reply.headers}
