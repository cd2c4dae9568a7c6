"""Tracing without a proxy: an agent's calls are recorded where they are made, in the HTTP client that makes them.

What is sent, what is read of the reply and what is stored is the proxy's own code, so the trainer cannot tell which of
the two traced a call. Rollouts share one client; whose call it is, is known from the context of the task that makes
it, which every task and thread that a framework starts inherits. A client that is not ours is not seen: for such
agents there is the proxy.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

import httpx

from groundwire.adapters.tracing.emitted_spans import current_emissions
from groundwire.adapters.tracing.openai_wire import (
    CLIENT_GONE,
    SESSION_HEADER,
    HttpExchange,
    RefusedError,
    calling_agent,
    check_one_sample,
    has_ended,
    read_request,
    traced_request,
)
from groundwire.adapters.tracing.span_writer import PendingSpan, SpanWriter

__all__ = ["Recorder", "RecordingTransport"]

_GONE = "the client left before the reply was complete"


class Recorder:
    """Writes down the calls of one attempt. ``model`` replaces the name that the agent asks for."""

    def __init__(self, writer: SpanWriter, *, rollout_id: str, attempt_id: str, model: str) -> None:
        self._writer, self._rollout_id, self._attempt_id, self._model = writer, rollout_id, attempt_id, model
        self.calls = 0
        """How many calls were made so far, failed ones too."""

    @contextmanager
    def listening(self) -> Iterator[Recorder]:
        """Record what is called inside, in this task and in those that it starts."""
        token = _recorder.set(self)
        try:
            yield self
        finally:
            _recorder.reset(token)

    async def send(self, request: httpx.Request, transport: httpx.AsyncBaseTransport) -> httpx.Response:
        """Send a chat completion on and record it; as with the proxy, the reply is passed on as it came."""
        self.calls += 1
        call = _Call(
            self._writer,
            HttpExchange(
                rollout_id=self._rollout_id,
                attempt_id=self._attempt_id,
                agent=calling_agent(request.headers),
                started=time.time(),
            ),
        )
        try:
            call.exchange.request = payload = read_request(await request.aread())
            check_one_sample(payload)
            reply = await transport.handle_async_request(self._traced(request, payload))
        except RefusedError as refused:
            call.end(str(refused), status=refused.status)
            return httpx.Response(refused.status, json=refused.body(), request=request)
        except httpx.HTTPError as error:
            call.end(f"the policy server at {request.url} did not answer: {error!r}", status=_status(error))
            raise
        except BaseException as error:
            gone = isinstance(error, asyncio.CancelledError)
            call.end(_GONE if gone else f"the client failed: {error!r}", status=CLIENT_GONE if gone else 500)
            raise
        call.exchange.status = reply.status_code
        call.exchange.streamed = reply.headers.get("content-type", "").startswith("text/event-stream")
        assert isinstance(reply.stream, httpx.AsyncByteStream)
        reply.stream = _RecordedReply(reply.stream, call)
        return reply

    def _traced(self, request: httpx.Request, payload: Mapping[str, Any]) -> httpx.Request:
        headers = request.headers.copy()
        del headers["content-length"]
        headers.update({"accept-encoding": "identity", SESSION_HEADER: quote(self._rollout_id, safe="")})
        body = json.dumps(traced_request(payload, model=self._model)).encode()
        return httpx.Request(request.method, request.url, headers=headers, content=body, extensions=request.extensions)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


class RecordingTransport(httpx.AsyncBaseTransport):
    """Sends requests by ``transport``; where a :class:`Recorder` listens, it records them."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``, for whichever rollout made it."""
        recorder, emissions = _recorder.get(), current_emissions()
        if emissions is not None and _is_call(request):
            emissions.calls += 1
        if recorder is None or request.method != "POST":
            return await self._transport.handle_async_request(request)
        if not _is_call(request):
            refused = RefusedError(
                404, f"POST {request.url.path} is not traced: use chat/completions (not responses, not completions)"
            )
            return httpx.Response(refused.status, json=refused.body(), request=request)
        return await recorder.send(request, self._transport)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


def _is_call(request: httpx.Request) -> bool:
    return request.method == "POST" and request.url.path.endswith("/chat/completions")


class _Call:
    """A call on its way; the first end counts."""

    def __init__(self, writer: SpanWriter, exchange: HttpExchange) -> None:
        self.exchange = exchange
        self._writer = writer
        self._ticket: PendingSpan = writer.reserve(exchange.rollout_id, exchange.attempt_id)

    def end(self, error: str = "", *, status: int | None = None) -> None:
        exchange = self.exchange
        if exchange.ended:
            return
        exchange.ended, exchange.error = time.time(), error
        if status is not None:
            exchange.status = status
        self._writer.finish(self._ticket, exchange)


class _RecordedReply(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, call: _Call) -> None:
        self._stream, self._call, self._received = stream, call, bytearray()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        call, streamed = self._call, self._call.exchange.streamed
        try:
            async for chunk in self._stream:
                self._received += chunk
                if streamed and has_ended(self._received, chunk):
                    self._end()  # before the agent can know that the reply is complete
                yield chunk
        except httpx.HTTPError as error:
            call.exchange.body = bytes(self._received)
            call.end(f"the policy server broke off its reply: {error!r}", status=None if streamed else _status(error))
            raise
        self._end()

    async def aclose(self) -> None:
        self._call.end(_GONE, status=CLIENT_GONE)  # where the whole reply was read, it has ended already
        await self._stream.aclose()

    def _end(self) -> None:
        self._call.exchange.body = bytes(self._received)
        self._call.end()


def _status(error: httpx.HTTPError) -> int:
    silent = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
    return 504 if silent else 502
