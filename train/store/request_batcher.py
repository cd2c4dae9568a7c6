"""Requests that go to a store together: the runners of a process do the same things at the same moments.

Nothing waits for company. A request goes at once where few are under way; what is asked meanwhile goes with the next.
Batches are small, because a store that dies in the middle of one has done what it never acknowledged.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pydantic_core

__all__ = ["Answer", "RequestBatcher"]

Answer = tuple[int, bytes]
"""A reply's status and body."""

_UNDER_WAY = 2
_MOST, _MOST_BYTES = 32, 4 << 20
_CLIENT_ERRORS, _REQUEST_TIMEOUT = range(400, 500), 408
_PLAIN = re.compile(r"[\w./-]+", re.ASCII)
_SLOW = re.compile(r"/waits/.*|.*/search")


@dataclass(frozen=True, slots=True)
class _Asked:
    method: str
    path: str
    body: bytes
    answer: asyncio.Future[Answer]


class RequestBatcher:
    """The requests of one event loop; ``send(method, path, body)`` sends one."""

    def __init__(self, send: Callable[[str, str, bytes], Awaitable[Answer]]) -> None:
        self._loop, self._send = asyncio.get_running_loop(), send
        self._asked = list[_Asked]()
        self._under_way = set[asyncio.Task[None]]()

    def takes(self, path: str) -> bool:
        """Whether it is asked on this loop, means the same within a batch, and holds up no other for long."""
        here = asyncio.get_running_loop() is self._loop
        return here and bool(_PLAIN.fullmatch(path)) and not _SLOW.fullmatch(path)

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        """Send it, alone or with others. Raises what ``send`` raises."""
        asked = _Asked(method, path, body, self._loop.create_future())
        self._asked.append(asked)
        if len(self._under_way) < _UNDER_WAY:
            task = asyncio.create_task(self._work())
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
        return await asked.answer

    async def _work(self) -> None:
        now: Sequence[_Asked] = ()
        try:
            while now := self._take():
                await self._settle(now)
        finally:  # where the loop ends it, nobody may wait for an answer
            for asked in (*now, *self._asked):
                asked.answer.cancel()
            self._asked.clear()

    def _take(self) -> Sequence[_Asked]:
        waiting = [asked for asked in self._asked if not asked.answer.done()]  # who has left wants nothing any more
        count = size = 0
        for asked in waiting[:_MOST]:
            size += len(asked.body)
            if count and size > _MOST_BYTES:
                break
            count += 1
        self._asked = waiting[count:]
        return waiting[:count]

    async def _settle(self, now: Sequence[_Asked]) -> None:
        try:
            pairs = list(zip(now, await self._answers(now), strict=True))
        except Exception as error:
            pairs = [(asked, error) for asked in now]
        for asked, answer in pairs:
            if asked.answer.done():
                continue
            if isinstance(answer, BaseException):
                asked.answer.set_exception(answer)
            else:
                asked.answer.set_result(answer)

    async def _answers(self, now: Sequence[_Asked]) -> Sequence[Answer | BaseException]:
        if len(now) > 1:
            batch = [(asked.method.upper(), asked.path, asked.body.decode()) for asked in now]
            status, data = await self._send("post", "/batch", pydantic_core.to_json(batch))
            if status == _REQUEST_TIMEOUT or status > _CLIENT_ERRORS[-1]:
                return [(status, data)] * len(now)
            if status not in _CLIENT_ERRORS:
                return [(status, answer.encode()) for status, answer in pydantic_core.from_json(data)]
            # It does not take batches, or none of this size: that says nothing about any request in it.
        alone = (self._send(asked.method, asked.path, asked.body) for asked in now)
        return await asyncio.gather(*alone, return_exceptions=True)
