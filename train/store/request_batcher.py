"""Sends requests to a store in batches: the runners of a process make the same requests at the same moments.

A request is never delayed to fill a batch: it is sent at once if few are in flight, else with the next batch. Batches
are small, since a store that dies in the middle of one has executed requests that it never acknowledged.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pydantic_core

__all__ = ["RequestBatcher", "Response"]

Response = tuple[int, bytes]
"""Status and body."""

_MAX_IN_FLIGHT = 2
_MAX_BATCH, _MAX_BATCH_BYTES = 32, 4 << 20
_CLIENT_ERRORS, _REQUEST_TIMEOUT = range(400, 500), 408
_PLAIN_PATH = re.compile(r"[\w./-]+", re.ASCII)
_SLOW_PATH = re.compile(r"/waits/.*|.*/search")


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    body: bytes
    response: asyncio.Future[Response]


class RequestBatcher:
    """Batches the requests of one event loop; ``send_one(method, path, body)`` sends a single request."""

    def __init__(self, send_one: Callable[[str, str, bytes], Awaitable[Response]]) -> None:
        self._loop, self._send_one = asyncio.get_running_loop(), send_one
        self._waiting: list[_Request] = []
        self._senders: set[asyncio.Task[None]] = set()

    def accepts(self, path: str) -> bool:
        """Whether a request may be batched: it comes from this loop, needs no escaping, and is quick."""
        same_loop = asyncio.get_running_loop() is self._loop
        return same_loop and bool(_PLAIN_PATH.fullmatch(path)) and not _SLOW_PATH.fullmatch(path)

    async def send(self, method: str, path: str, body: bytes) -> Response:
        """Send a request, alone or in a batch. Raises the errors of ``send_one``."""
        request = _Request(method, path, body, self._loop.create_future())
        self._waiting.append(request)
        if len(self._senders) < _MAX_IN_FLIGHT:
            sender = asyncio.create_task(self._send_waiting())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await request.response

    async def _send_waiting(self) -> None:
        batch: Sequence[_Request] = ()
        try:
            while batch := self._next_batch():
                await self._send_batch(batch)
        finally:  # cancelled with the loop: nothing may wait for a response
            for request in (*batch, *self._waiting):
                request.response.cancel()
            self._waiting.clear()

    def _next_batch(self) -> Sequence[_Request]:
        waiting = [request for request in self._waiting if not request.response.done()]  # without cancelled ones
        count = size = 0
        for request in waiting[:_MAX_BATCH]:
            size += len(request.body)
            if count and size > _MAX_BATCH_BYTES:
                break
            count += 1
        self._waiting = waiting[count:]
        return waiting[:count]

    async def _send_batch(self, batch: Sequence[_Request]) -> None:
        try:
            responses = await self._responses(batch)
        except Exception as error:
            responses = [error] * len(batch)
        for request, response in zip(batch, responses, strict=True):
            if request.response.done():
                continue
            if isinstance(response, BaseException):
                request.response.set_exception(response)
            else:
                request.response.set_result(response)

    async def _responses(self, batch: Sequence[_Request]) -> Sequence[Response | BaseException]:
        if len(batch) > 1:
            requests = [(request.method.upper(), request.path, request.body.decode()) for request in batch]
            status, data = await self._send_one("post", "/batch", pydantic_core.to_json(requests))
            if status == _REQUEST_TIMEOUT or status > _CLIENT_ERRORS[-1]:
                return [(status, data)] * len(batch)
            if status not in _CLIENT_ERRORS:
                return [(status, body.encode()) for status, body in pydantic_core.from_json(data)]
            # Batches, or batches of this size, are refused: send each request alone.
        single = (self._send_one(request.method, request.path, request.body) for request in batch)
        return await asyncio.gather(*single, return_exceptions=True)
