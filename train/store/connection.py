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
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import aiohttp
import pydantic_core

from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.http.access_token import token_for
from groundwire.train.store.errors import DAMAGED, StoreFailedError, StoreGoneError
from groundwire.train.store.health import API, STORE_WAIT_S, check_store

_log = logging.getLogger(__name__)
_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 2.0
_CLIENT_ERROR, _REQUEST_TIMEOUT, _SERVER_ERROR = 400, 408, 500
_MAX_FAILURES = 4
_REQUEST_TIMEOUT_S, _CONNECT_S = 60.0, 5.0
_MAX_IN_FLIGHT = 2
_MAX_BATCH = 32
MAX_BATCH_BYTES = 1 << 20
"""Bytes of JSON in a request with many parts: other clients wait while it is read."""
_PLAIN_PATH = re.compile(r"[\w./-]+", re.ASCII)
_SLOW_PATH = re.compile(r"/waits/.*|.*/search")

Response = tuple[int, bytes]
"""Status and body."""


class StoreConnection:
    """A connection to the store at ``address``, ours or Agent Lightning's. Call :meth:`start` before use.

    Without a ``token``, that of the environment or the user is sent.

    A request whose response was lost is sent again. So a rollout may be enqueued twice, and one taken from the queue
    may have to wait until its runner counts as unresponsive; none is lost.
    """

    batches = False
    """Whether the store accepts batches, also of spans and of sequence ids."""
    _session: aiohttp.ClientSession | None = None

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = float("inf")) -> None:
        self.address = address.rstrip("/")
        self.token = token or token_for(address)
        self._timeout_s = timeout_s
        self._away_since: float | None = None

    async def start(self, wait_s: float = STORE_WAIT_S) -> None:
        """Check the store, which may start within ``wait_s`` seconds. Raises
        :class:`groundwire.train.store.errors.StoreAddressError`.
        """
        on_wait = partial(_log.warning, "%s")
        check = partial(check_store, self.address, token=self.token, timeout_s=wait_s, on_wait=on_wait)
        health = await asyncio.wrap_future(in_thread(check, name="store"))
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S, connect=_CONNECT_S, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        self._batcher, self.batches = RequestBatcher(self._send), bool(health.get("batches"))

    async def stop(self) -> None:
        """Close the connections; later requests raise ``RuntimeError``."""
        if self._session is not None:
            await self._session.close()

    async def request(self, method: str, path: str, *, json: Any = None) -> Any:
        """The JSON of the response.

        Raises ``ValueError`` for a refused request, :class:`StoreGoneError` and :class:`StoreFailedError`.
        """
        body = b"" if json is None else pydantic_core.to_json(json)
        send = self._batcher.send if self.batches and self._batcher.accepts(path) else self._send
        delay, failures, failing_since = _FIRST_DELAY_S, 0, float("inf")
        while True:
            try:
                status, data = await send(method, path, body)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as away:
                reason = str(away) or type(away).__name__
            else:
                if status < _CLIENT_ERROR:
                    if self._away_since is not None:
                        away_s, self._away_since = time.monotonic() - self._away_since, None
                        _log.warning("the store at %s is back after %.1f s", self.address, away_s)
                    return pydantic_core.from_json(data)
                error = _read_error(data)
                if _is_refusal(status, error):
                    raise ValueError(f"the store refused {method.upper()} {path}: {error['detail']}")
                failures += status == _SERVER_ERROR or error.get("error_type") == DAMAGED
                if failures > _MAX_FAILURES:
                    raise StoreFailedError(f"the store fails at {method.upper()} {path}: {error['detail']}")
                reason = f"status {status}: {error['detail']}"
            failing_since = min(failing_since, time.monotonic())
            self._note_away(reason, failing_since)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY_S)

    async def _send(self, method: str, path: str, body: bytes) -> Response:
        assert self._session is not None
        url = f"{self.address}{API}{path}"
        async with self._session.request(method, url, data=body or None) as response:
            return response.status, await response.read()

    def _note_away(self, reason: str, failing_since: float) -> None:
        """Raises :class:`StoreGoneError` after ``timeout_s`` seconds, also if the store answers other requests."""
        if self._away_since is None:
            self._away_since = time.monotonic()
            _log.warning("the store at %s does not answer (%s); waiting for it", self.address, reason)
        if (away_s := time.monotonic() - min(self._away_since, failing_since)) > self._timeout_s:
            message = f"the store at {self.address} has been away for {away_s:.0f} s"
            raise StoreGoneError(f"{message}; last error: {reason}")


def _is_refusal(status: int, error: Mapping[str, Any]) -> bool:
    """Whether the request would fail again. Agent Lightning's server reports an unknown rollout as status 500."""
    is_refused = _CLIENT_ERROR <= status < _SERVER_ERROR and status != _REQUEST_TIMEOUT
    return is_refused or error.get("error_type") == "ValueError"


def _read_error(body: bytes) -> dict[str, Any]:
    """The fields of an error; its "detail" is one line of a log."""
    try:
        error = pydantic_core.from_json(body)
    except ValueError:
        error = None
    fields = error if isinstance(error, dict) else {}
    traceback = str(fields.get("traceback", "")).strip().rpartition("\n")[2]  # of Agent Lightning's server
    detail = traceback or fields.get("detail") or body[:200].decode(errors="replace")
    return {**fields, "detail": " ".join(str(detail).split())}


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    body: bytes
    response: asyncio.Future[Response]


class RequestBatcher:
    """Batches the requests of one event loop; ``send_one(method, path, body)`` sends a single request."""

    def __init__(self, send_one: Callable[[str, str, bytes], Awaitable[Response]]) -> None:
        self._send_one = send_one
        self._waiting: deque[_Request] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    def accepts(self, path: str) -> bool:
        """Whether a request may be batched: it needs no escaping, and is quick."""
        return bool(_PLAIN_PATH.fullmatch(path)) and not _SLOW_PATH.fullmatch(path)

    async def send(self, method: str, path: str, body: bytes) -> Response:
        """Send a request, alone or in a batch. Raises the errors of ``send_one``."""
        request = _Request(method, path, body, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if len(self._senders) < _MAX_IN_FLIGHT:
            self._senders.add(asyncio.create_task(self._send_waiting()))
        return await request.response

    async def _send_waiting(self) -> None:
        batch: Sequence[_Request] = ()
        try:
            while batch := self._next_batch():
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
        finally:
            # At once, and not when the task is done: a request of the meantime would wait for a sender that has ended.
            self._senders.discard(cast("asyncio.Task[None]", asyncio.current_task()))
            # Cancelled with the loop: nothing may wait for a response.
            for request in (*batch, *self._waiting):
                request.response.cancel()
            self._waiting.clear()

    def _next_batch(self) -> Sequence[_Request]:
        batch, size = list[_Request](), 0
        while self._waiting and len(batch) < _MAX_BATCH:
            size += len(self._waiting[0].body)
            if batch and size > MAX_BATCH_BYTES:
                break
            request = self._waiting.popleft()
            if not request.response.done():  # it was cancelled
                batch.append(request)
        return batch

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
