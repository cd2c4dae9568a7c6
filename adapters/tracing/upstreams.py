"""The policy servers behind the proxy, which are asked over HTTP.

Chat completions are passed on byte for byte, streams chunk by chunk, without the usage if only the proxy asked for it,
errors with their status; the replies for other APIs are translated. Nothing is parsed that need not be: replies are
read for their spans afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp
import pydantic_core
from aiohttp import web

from groundwire.adapters.tracing.calls import LLMCall, unpack_body
from groundwire.adapters.tracing.wire.apis import send_stream
from groundwire.adapters.tracing.wire.call import ChatCall, WireCall
from groundwire.adapters.tracing.wire.completions import CompletionsCall
from groundwire.adapters.tracing.wire.exchange import (
    UNREADABLE,
    EventReader,
    HttpExchange,
    as_chat,
    error_code,
    error_message,
    has_ended,
    parse_reply,
)
from groundwire.adapters.tracing.wire.request import (
    ERROR_HEADER,
    SESSION_HEADER,
    RefusedError,
    traced_request,
    wants_usage,
)
from groundwire.tools.secrets import MIN_LENGTH, register_secret

_CONNECT_S = 10.0
# Servers close idle connections after 5 s (the default of uvicorn, and so of vLLM): close ours first.
_KEEPALIVE_S = 3.0
_OK = 200
_KEY_HEADERS = ("X-Api-Key", "X-Goog-Api-Key")  # of Anthropic's and Google's clients
_USAGE = re.compile(rb'"usage": ?\{')
_RETURNED_HEADERS = ("Content-Type", "Retry-After", "X-Request-Id")


class Upstreams:
    """OpenAI-compatible servers. The arguments are those of :class:`groundwire.adapters.tracing.proxy.LLMProxy`."""

    def __init__(
        self, urls: Sequence[str], *, model: str | None, api_key: str | None, ids: bool, timeout_s: float
    ) -> None:
        self.urls: Sequence[str] = list(urls)
        self.model = model
        self._api_key, self._ids, self._timeout_s = api_key, ids, timeout_s
        self._masked = api_key.encode() if api_key and len(api_key) >= MIN_LENGTH else b""
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
        url = "" if exchange.recorded else self._url(exchange.rollout_id)
        sent = pydantic_core.to_json(traced_request(call.chat, model=self.model, ids=self._ids))
        path = (CompletionsCall if isinstance(call, CompletionsCall) else ChatCall).path
        sent_headers = {**self._headers(request), SESSION_HEADER: session}
        try:
            post = self._post(f"{url}/{path}", sent, sent_headers) if url else _recorded_reply(exchange.recorded[0])
            async with await post as reply:
                exchange.status = reply.status
                if reply.content_type == "text/event-stream":
                    exchange.streamed = True
                    shown = _WithoutUsage() if isinstance(call, ChatCall) and not wants_usage(call.chat) else None
                    received = self._received(reply, exchange, record, shown)
                    if isinstance(call, ChatCall):
                        return await send_stream(request, call, received, reply.status, _returned_headers(reply))
                    return await send_stream(request, call, _translated_events(call, received), reply.status)
                exchange.body, exchange.ended = self._without_key(await reply.read()), time.time()
                headers = _returned_headers(reply)
                if isinstance(call, ChatCall):
                    return web.Response(status=reply.status, body=exchange.body, headers=headers)
                if reply.status != _OK and (code := error_code(exchange.body)):
                    headers[ERROR_HEADER] = code
                return web.Response(status=reply.status, body=_translated(call, exchange), headers=headers)
        except asyncio.TimeoutError as error:
            raise RefusedError(504, f"the policy server at {url} was silent for {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            if exchange.streamed:  # the agent left
                raise
            raise RefusedError(
                502, f"the policy server at {url} did not answer: {error or type(error).__name__}"
            ) from error

    async def forward(self, request: web.Request, path: str, body: Mapping[str, Any] | None = None) -> web.Response:
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

    async def count_tokens(self, request: web.Request, chat: Mapping[str, Any]) -> int:
        """The length of the prompt of a chat request. Every server says it with a reply, so it is asked for one token.

        Raises :class:`RefusedError` if there is no answer.
        """
        asked = {name: chat[name] for name in ("model", "messages", "tools") if name in chat}
        reply = await self.forward(request, ChatCall.path, {**asked, "max_tokens": 1})
        body = reply.body if isinstance(reply.body, bytes) else b""
        if reply.status != _OK:
            raise RefusedError(reply.status, error_message(body))
        try:
            return int(parse_reply(body)["usage"]["prompt_tokens"])
        except UNREADABLE as error:
            raise RefusedError(502, f"the policy server's reply has no number of tokens: {error!r}") from error

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        try:
            return await self._session.post(url, data=body, headers=headers)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # The server had just closed this kept connection. Nothing was sampled, so asking again is safe.
            return await self._session.post(url, data=body, headers=headers)

    async def _received(
        self,
        reply: aiohttp.ClientResponse | _RecordedReply,
        exchange: HttpExchange,
        record: Callable[[], None],
        shown: _WithoutUsage | None,
    ) -> AsyncGenerator[bytes, None]:
        """A stream as it arrives, or what is ``shown`` of it.

        Raises :class:`RefusedError` if the server breaks it off.
        """
        received = bytearray()
        try:
            async for data in reply.content.iter_any():
                masked = self._without_key(data)
                received += masked
                if has_ended(received, masked):
                    exchange.body = bytes(received)
                    record()
                if seen := masked if shown is None else shown.feed(masked):
                    yield seen
            exchange.ended = exchange.ended or time.time()
            if shown is not None and shown.rest:
                yield shown.rest
        except (asyncio.TimeoutError, aiohttp.ClientError) as error:
            exchange.error = f"the policy server broke off its stream: {error!r}"
            raise RefusedError(502, exchange.error) from error
        finally:
            exchange.body = bytes(received)

    def _without_key(self, data: bytes) -> bytes:
        """``data`` without the API key: a server may repeat the key that it refuses."""
        return data.replace(self._masked, b"***") if self._masked else data

    def _headers(self, request: web.Request) -> dict[str, str]:
        key, sent = self._api_key, request.headers
        if key is None and sent.get("Authorization", "AWS4").startswith("AWS4"):  # a signature is of another request
            key = next((sent[name] for name in _KEY_HEADERS if name in sent), None)
        elif key is None:
            return {"Authorization": sent["Authorization"]}
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _url(self, rollout_id: str) -> str:
        if not self.urls:
            raise RefusedError(503, "no policy server is set: give the proxy's upstreams at least one base URL")
        return self.urls[zlib.crc32(rollout_id.encode()) % len(self.urls)].rstrip("/")


async def _translated_events(call: WireCall, received: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """A stream of chat chunks in the format of the call's API. Raises :class:`RefusedError` for an error in it."""
    reader, finished = EventReader(), False
    try:
        async with aclosing(_with_last_line(received)) as lines:
            async for data in lines:
                for chunk in reader.feed(data):
                    finished = finished or any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
                    yield call.events(chunk)
                if reader.ended:
                    break
        if reader.ended or finished:  # some servers send no [DONE]
            yield call.end()
            return
    except UNREADABLE as error:
        raise RefusedError(502, f"the policy server's stream cannot be read: {error!r}") from error
    raise RefusedError(502, "the policy server's stream ended before the reply was complete")


async def _with_last_line(received: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """``received`` with the end of its last line, which a server may leave out."""
    async with aclosing(received):
        async for data in received:
            yield data
    yield b"\n"


class _WithoutUsage:
    """Takes the chunk with the usage out of a stream whose agent has not asked for it."""

    def __init__(self) -> None:
        self.rest = b""
        """The beginning of a line."""

    def feed(self, data: bytes) -> bytes:
        """The lines that ``data`` completes."""
        if not self.rest and data.endswith(b"\n") and b'"usage"' not in data:  # nearly always
            return data
        head, end, self.rest = (self.rest + data).rpartition(b"\n")
        if _USAGE.search(head):
            head = b"\n".join(line for line in head.split(b"\n") if not _is_usage(line))
        return head + end


def _is_usage(line: bytes) -> bool:
    """Whether a line is a chunk that has the usage alone; one that also has choices is the agent's."""
    if not line.startswith(b"data:") or not _USAGE.search(line):
        return False
    try:
        return not parse_reply(line[len(b"data:") :]).get("choices")
    except UNREADABLE:
        return False


def _translated(call: WireCall, exchange: HttpExchange) -> bytes:
    if exchange.status != _OK:
        return json.dumps(call.error(RefusedError(exchange.status, error_message(exchange.body)))).encode()
    try:
        return json.dumps(call.reply(as_chat(parse_reply(exchange.body)))).encode()
    except UNREADABLE as error:
        raise RefusedError(502, f"the policy server's reply cannot be read: {error!r}") from error


@dataclass(frozen=True)
class _RecordedReply:
    """A recorded reply, with what is used of a server's."""

    status: int
    body: bytes

    @property
    def content_type(self) -> str:
        return "application/json" if self.body.lstrip().startswith((b"{", b"[")) else "text/event-stream"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Content-Type": self.content_type}

    @property
    def content(self) -> _RecordedReply:
        return self

    async def read(self) -> bytes:
        return self.body

    async def iter_any(self) -> AsyncGenerator[bytes, None]:
        yield self.body

    async def __aenter__(self) -> _RecordedReply:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def _recorded_reply(call: LLMCall) -> _RecordedReply:
    """Raises :class:`RefusedError` if there was no reply."""
    if not call.reply_body:
        raise RefusedError(call.status, call.error)
    return _RecordedReply(call.status, unpack_body(call.reply_body))


def _returned_headers(reply: aiohttp.ClientResponse | _RecordedReply) -> dict[str, str]:
    return {name: reply.headers[name] for name in _RETURNED_HEADERS if name in reply.headers}
