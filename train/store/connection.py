"""The HTTP connection to a store's server: it waits while the store is away, and sends requests in batches.

Agent Lightning's own client gives up after eight seconds, or at once and silently when it takes rollouts from the
queue. This one repeats requests for ``timeout_s`` seconds, logs once that it waits, and distinguishes a store that is
away (:class:`StoreGoneError`) from a refused request (``ValueError``, never repeated).

If the store supports batches, as ours does, spans, sequence ids and other requests are sent in batches: the runners of
a process make the same requests at the same moments. A request is never delayed to fill a batch: it is sent at once if
few are in flight, else with the next batch. Batches are small, since a store that dies in the middle of one has
executed requests that it never acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast
from weakref import WeakKeyDictionary

import aiohttp
import pydantic_core

from groundwire.tools.http.access_token import token_for
from groundwire.train.store.errors import DAMAGED, StoreFailedError, StoreGoneError
from groundwire.train.store.health import API, check_store

_log = logging.getLogger(__name__)
_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 2.0
_CLIENT_ERROR, _REQUEST_TIMEOUT, _SERVER_ERROR = 400, 408, 500
_MAX_FAILURES = 4
_REQUEST_TIMEOUT_S, _CONNECT_S = 60.0, 5.0
_MAX_IN_FLIGHT = 2
_MAX_BATCH = 32
MAX_BATCH_BYTES = 4 << 20
"""Bytes of JSON in a request with many parts."""
_PLAIN_PATH = re.compile(r"[\w./-]+", re.ASCII)
_SLOW_PATH = re.compile(r"/waits/.*|.*/search")

Response = tuple[int, bytes]
"""Status and body."""


class StoreConnection:
    """A connection to the store at ``address``, ours or Agent Lightning's. Call :meth:`start` before use.

    Without a ``token``, that of the environment or the user is sent. Any event loop may make requests.

    A request whose response was lost is sent again. So a rollout may be enqueued twice, and one taken from the queue
    may have to wait until its runner counts as unresponsive; none is lost.
    """

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = float("inf")) -> None:
        self.address = address.rstrip("/")
        self.token = token or token_for(address)
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if self.token is not None:
            self._headers["Authorization"] = f"Bearer {self.token}"
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()
        self._batcher: RequestBatcher | None = None
        self._away_since: float | None = None
        self._closed = False

    async def start(self) -> None:
        """Check the store. Raises :class:`groundwire.train.store.health.StoreAddressError`."""
        health = await asyncio.to_thread(check_store, self.address, token=self.token)
        if health.get("batches"):
            self._batcher = RequestBatcher(self._send)

    @property
    def batches(self) -> bool:
        """Whether the store accepts batches, also of spans and of sequence ids."""
        return self._batcher is not None

    async def close(self) -> None:
        """Close the connections; later requests raise ``RuntimeError``."""
        self._closed = True
        for loop, session in list(self._sessions.items()):
            if loop is asyncio.get_running_loop():
                await session.close()
            elif not loop.is_closed():
                asyncio.run_coroutine_threadsafe(session.close(), loop)

    async def request(self, method: str, path: str, *, json: Any = None) -> Any:
        """The JSON of the response.

        Raises ``ValueError`` for a refused request, :class:`StoreGoneError` and :class:`StoreFailedError`.
        """
        body = b"" if json is None else pydantic_core.to_json(json)
        batcher = self._batcher
        send = batcher.send if batcher is not None and batcher.accepts(path) else self._send
        delay, failures, failing_since = _FIRST_DELAY_S, 0, float("inf")
        while True:
            try:
                status, data = await send(method, path, body)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                reason: Any = error
            else:
                if status < _CLIENT_ERROR:
                    if self._away_since is not None:
                        away_s, self._away_since = time.monotonic() - self._away_since, None
                        _log.warning("the store at %s is back after %.1f s", self.address, away_s)
                    return pydantic_core.from_json(data)
                if (refused := _refusal(status, data)) is not None:
                    raise ValueError(f"the store refused {method.upper()} {path}: {refused}")
                failures += status == _SERVER_ERROR or _parse_error(data).get("error_type") == DAMAGED
                if failures > _MAX_FAILURES:
                    raise StoreFailedError(f"the store fails at {method.upper()} {path}: {_error_message(data)}")
                reason = f"status {status}: {_error_message(data)}"
            failing_since = min(failing_since, time.monotonic())
            self._note_away(reason, failing_since)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY_S)

    async def _send(self, method: str, path: str, body: bytes) -> Response:
        if self._closed:
            raise RuntimeError(f"the client of the store at {self.address} is closed")
        url = f"{self.address}{API}{path}"
        async with self._session().request(method, url, data=body or None, headers=self._headers) as response:
            return response.status, await response.read()

    def _session(self) -> aiohttp.ClientSession:
        """The session of the running event loop: a session serves one loop."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S, connect=_CONNECT_S, sock_connect=_CONNECT_S)
            session = self._sessions[loop] = aiohttp.ClientSession(timeout=timeout)
        return session

    def _note_away(self, error: Any, failing_since: float) -> None:
        """Raises :class:`StoreGoneError` after ``timeout_s`` seconds, also if the store answers other requests."""
        if self._away_since is None:
            self._away_since = time.monotonic()
            _log.warning("the store at %s does not answer (%s); waiting for it", self.address, error)
        if (away_s := time.monotonic() - min(self._away_since, failing_since)) > self._timeout_s:
            message = f"the store at {self.address} has been away for {away_s:.0f} s"
            raise StoreGoneError(f"{message}; last error: {str(error) or type(error).__name__}")


def _refusal(status: int, body: bytes) -> str | None:
    """The reason of a permanent refusal; None if the request may succeed later."""
    if _CLIENT_ERROR <= status < _SERVER_ERROR and status != _REQUEST_TIMEOUT:
        return _error_message(body)
    error = _parse_error(body)
    if error.get("error_type") == "ValueError":  # Agent Lightning's server reports an unknown rollout as status 500
        return str(error.get("traceback")).strip().rsplit("\n", 1)[-1]
    return None


def _error_message(body: bytes) -> str:
    message = str(_parse_error(body).get("detail") or body[:200].decode(errors="replace"))
    return " ".join(message.split())  # one line of a log


def _parse_error(body: bytes) -> dict[str, Any]:
    try:
        error = pydantic_core.from_json(body)
    except ValueError:
        return {}
    return error if isinstance(error, dict) else {}


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
            self._senders.add(asyncio.create_task(self._send_waiting()))
        return await request.response

    async def _send_waiting(self) -> None:
        batch: Sequence[_Request] = ()
        try:
            while batch := self._next_batch():
                await self._send_batch(batch)
        finally:
            # At once, and not when the task is done: a request of the meantime would wait for a sender that has ended.
            self._senders.discard(cast("asyncio.Task[None]", asyncio.current_task()))
            # Cancelled with the loop: nothing may wait for a response.
            for request in (*batch, *self._waiting):
                request.response.cancel()
            self._waiting.clear()

    def _next_batch(self) -> Sequence[_Request]:
        waiting = [request for request in self._waiting if not request.response.done()]  # without cancelled ones
        sizes = accumulate(len(request.body) for request in waiting[:_MAX_BATCH])
        count = max(1, sum(size <= MAX_BATCH_BYTES for size in sizes))
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
            if status == _REQUEST_TIMEOUT or status >= _SERVER_ERROR:
                return [(status, data)] * len(batch)
            if status < _CLIENT_ERROR:
                return [(status, body.encode()) for status, body in pydantic_core.from_json(data)]
            # Batches, or batches of this size, are refused: send each request alone.
        single = (self._send_one(request.method, request.path, request.body) for request in batch)
        return await asyncio.gather(*single, return_exceptions=True)
