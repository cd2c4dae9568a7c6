"""Agent Lightning's store client, for processes that outlive their store.

Agent Lightning's own gives up after eight seconds, or at once and in silence where it takes from the queue. This one
goes on asking until the store is back, for ``patience_s`` at most, says once that it waits, and tells a store that is
away (:class:`StoreGoneError`) from one that refuses (``ValueError``, which nobody should try again). Where the store
takes batches, as ours does, spans and their numbers go in batches, and so do requests
(:mod:`groundwire.train.store.request_batcher`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
import pydantic_core
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import AttemptedRollout, Span

from groundwire.train.store.errors import StoreFailedError, StoreGoneError
from groundwire.train.store.health import check_store
from groundwire.train.store.request_batcher import Answer, RequestBatcher

__all__ = ["StoreClient"]

_log = logging.getLogger(__name__)
_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 2.0
_CLIENT_ERROR, _REQUEST_TIMEOUT, _SERVER_ERROR = 400, 408, 500
_FAILURES = 4
_REQUEST_S = 60.0


class StoreClient(LightningStoreClient):
    """A client of the store at ``address``, of whatever make.

    :meth:`start` before use. Where a reply was lost, what it answered is asked twice, one request or a batch: enqueued
    rollouts may then run once for nobody, and those taken from the queue wait for their heartbeat to be missed. None is
    lost.
    """

    def __init__(self, address: str, *, patience_s: float = float("inf")) -> None:
        super().__init__(address, request_timeout=_REQUEST_S, retry_delays=(), health_retry_delays=())
        self._patience_s = patience_s
        self._together: RequestBatcher | None = None
        self._away_since: float | None = None
        self._closed = False

    async def start(self) -> None:
        """See what answers there. Raises :class:`groundwire.train.store.errors.StoreAddressError`."""
        health = await asyncio.to_thread(check_store, self.server_address_root)
        if health.get("batches"):
            self._together = RequestBatcher(self._send)

    async def stop(self) -> None:
        """Close the connections."""
        await self.close()

    async def _request_json(self, method: str, path: str, *, json: Any = None, params: Any = None) -> Any:
        body = b"" if json is None else pydantic_core.to_json(json)
        ask: Callable[[str, str, bytes], Awaitable[Answer]] = partial(self._send, params=params)
        if self._together is not None and params is None and self._together.takes(path):
            ask = self._together.ask
        delay, failures = _FIRST_DELAY_S, 0
        while True:
            try:
                status, data = await ask(method, path, body)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                self._away(error)
            else:
                if status < _CLIENT_ERROR:
                    self._back()
                    return pydantic_core.from_json(data)
                if (why := _refusal(status, data)) is not None:
                    raise ValueError(f"the store refused {method.upper()} {path}: {why}")
                failures += status == _SERVER_ERROR
                if failures > _FAILURES:
                    raise StoreFailedError(f"the store fails at {method.upper()} {path}: {_said(data)}")
                self._away(f"status {status}: {_said(data)}")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY_S)

    async def _send(self, method: str, path: str, body: bytes, params: Any = None) -> Answer:
        if self._closed:
            raise RuntimeError(f"the client of the store at {self.server_address_root} is closed")
        session, url = await self._get_session(), f"{self.server_address}{path}"
        headers = {"Content-Type": "application/json"}
        async with session.request(method, url, data=body or None, params=params, headers=headers) as reply:
            return reply.status, await reply.read()

    async def close(self) -> None:
        """Close the connections; what is asked from now on is refused."""
        self._closed = True
        await super().close()

    def _back(self) -> None:
        if self._away_since is not None:
            _log.warning("the store at %s is back after %.1f s", self.server_address_root, self._away_for())
            self._away_since = None

    def _away(self, error: Any) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            _log.warning("the store at %s does not answer (%s); waiting for it", self.server_address_root, error)
        if self._away_for() > self._patience_s:
            raise StoreGoneError(f"the store at {self.server_address_root} has been away for {self._away_for():.0f} s")

    def _away_for(self) -> float:
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    async def _dequeue_batch(self, *, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        payload = {"limit": limit, "worker_id": worker_id}
        taken = await self._request_json("post", "/queues/rollouts/dequeue", json=payload)
        return [AttemptedRollout.model_validate(item) for item in taken]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each pair, rising within a rollout."""
        if self._together is None:
            return await super().get_many_span_sequence_ids(rollout_attempt_ids)
        return await self._request_json("post", "/spans/next/batch", json=rollout_attempt_ids)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Persist spans; returns those that were new."""
        if self._together is None:
            return await super().add_many_spans(spans)
        new = set(await self._request_json("post", "/spans/batch", json=list(spans)))
        return [span for span in spans if span.span_id in new]


def _refusal(status: int, body: bytes) -> str | None:
    """Why the store will not do it, ever; None where it may when it is asked again."""
    if _CLIENT_ERROR <= status < _SERVER_ERROR and status != _REQUEST_TIMEOUT:
        return _said(body)
    answer = _answer(body)
    if answer.get("error_type") == "ValueError":
        # Agent Lightning's server has no other word for a rollout that is not there.
        return str(answer.get("traceback")).strip().rsplit("\n", 1)[-1]
    return None


def _said(body: bytes) -> str:
    return str(_answer(body).get("detail") or body[:200].decode(errors="replace"))


def _answer(body: bytes) -> dict[str, Any]:
    try:
        answer = pydantic_core.from_json(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
