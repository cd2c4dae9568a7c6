"""A policy in this process, and its answers in the API of the agent."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from groundwire.adapters.tracing.wire.call import WireCall
from groundwire.adapters.tracing.wire.errors import RefusedError
from groundwire.adapters.tracing.wire.exchange import OnSampled

__all__ = ["LocalPolicy", "answer"]


class LocalPolicy(Protocol):
    """A policy in this process. A second connection, with every id and logprob as JSON, was a third of the work of a
    rollout.

    ``body`` is a chat request. ``on_sampled`` is called before the reply is complete, and not for a refused request.
    """

    model_name: str

    async def complete(self, body: Any, *, session: str, on_sampled: OnSampled) -> dict[str, Any]:
        """A chat completion. Raises :class:`RefusedError`."""
        ...

    def stream(self, body: Any, *, session: str, on_sampled: OnSampled) -> AsyncGenerator[dict[str, Any], None]:
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
        completion = await policy.complete(call.chat, session=session, on_sampled=on_sampled)
        return web.json_response(call.reply(completion))
    async with aclosing(policy.stream(call.chat, session=session, on_sampled=on_sampled)) as chunks:
        first = await anext(chunks)
        # This sends the status, so later errors can only be events of the stream.
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        await stream.write(call.events(first))
        try:
            async for chunk in chunks:
                if events := call.events(chunk):
                    await stream.write(events)
            await stream.write(call.end())
        except RefusedError as error:
            await stream.write(call.error_event(error))
        await stream.write_eof()
        return stream
