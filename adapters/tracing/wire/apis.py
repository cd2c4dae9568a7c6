"""How a server answers a call of any API, or refuses it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from groundwire.adapters.tracing.wire.call import ChatCall, WireCall
from groundwire.adapters.tracing.wire.exchange import HttpExchange, OnSampled
from groundwire.adapters.tracing.wire.paths import find_api
from groundwire.adapters.tracing.wire.request import ERROR_HEADER, RefusedError
from groundwire.tools.secrets import masked_values


@web.middleware
async def answer_refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a request that is refused with an error in the format of its API."""
    try:
        return await handler(request)
    except RefusedError as refused:
        called = find_api(request.rel_url.raw_path)
        error = (called.api if called else ChatCall).error(refused)
        headers = {ERROR_HEADER: refused.code} if refused.code else None
        return web.json_response(masked_values(error), status=refused.status, headers=headers)


class LocalPolicy(Protocol):
    """A policy in this process: no second connection carries every id and logprob as JSON.

    ``body`` is a chat request. ``on_sampled`` is called before the reply is complete, and not for a refused request.
    The reply has the ids and times of the ``exchange``, and is its recorded one if it has one.
    """

    model_name: str

    async def complete(
        self, body: Any, *, session: str, on_sampled: OnSampled, exchange: HttpExchange
    ) -> dict[str, Any]:
        """A chat completion. Raises :class:`RefusedError`."""
        ...

    def stream(
        self, body: Any, *, session: str, on_sampled: OnSampled, exchange: HttpExchange
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a chat completion. Raises :class:`RefusedError`; closing it ends the sampling."""
        ...

    async def count_tokens(self, body: Any) -> int:
        """The length of the prompt of a chat request. Raises :class:`RefusedError`."""
        ...

    def models(self) -> dict[str, Any]:
        """OpenAI's list of models."""
        ...


async def answer(
    request: web.Request, call: WireCall, policy: LocalPolicy, *, session: str, on_sampled: OnSampled
) -> web.StreamResponse:
    """Answer ``call`` on ``request``. Raises :class:`RefusedError`, unless a stream has begun."""
    if call.chat.get("stream") is not True:
        completion = await policy.complete(call.chat, session=session, on_sampled=on_sampled, exchange=call.exchange)
        return web.json_response(call.reply(completion))
    chunks = policy.stream(call.chat, session=session, on_sampled=on_sampled, exchange=call.exchange)
    return await send_stream(request, call, _translated_events(call, chunks))


async def _translated_events(
    call: WireCall, chunks: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield call.events(chunk)
    yield call.end()


async def send_stream(
    request: web.Request,
    call: WireCall,
    events: AsyncGenerator[bytes, None],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Answer ``call`` on ``request`` with a stream. Raises the :class:`RefusedError` of the first event."""
    async with aclosing(events):
        first = await anext(events, b"")
        # This sends the status, so later errors can only be events of the stream.
        headers = headers or {"Content-Type": call.stream_type, "Cache-Control": "no-cache"}
        stream = web.StreamResponse(status=status, headers=headers)
        await stream.prepare(request)
        await stream.write(first)
        try:
            async for event in events:
                await stream.write(event)
        except RefusedError as error:
            await stream.write(call.error_event(error))
        await stream.write_eof()
        return stream
