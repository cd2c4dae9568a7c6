"""The trainer's client of a store: Agent Lightning's own client on a connection that waits while the store is away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Rollout, Span

from groundwire.train.store.backends.base import NotifyAttemptEnd
from groundwire.train.store.connection import MAX_BATCH_BYTES, StoreConnection

__all__ = ["StoreClient"]

_MAX_ROLLOUTS = 1000


class StoreClient(NotifyAttemptEnd, LightningStoreClient):
    """A client of the store at ``address``; the arguments are those of :class:`StoreConnection`.

    Call :meth:`start` before use.
    """

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = float("inf")) -> None:
        super().__init__(address, retry_delays=(), health_retry_delays=())
        self.connection = StoreConnection(address, token=token, timeout_s=timeout_s)

    def otlp_traces_endpoint(self) -> str:
        """The address to which OpenTelemetry's exporter sends spans, with the token as its password."""
        address, token = super().otlp_traces_endpoint(), self.connection.token
        if token is None:
            return address
        return address.replace("://", f"://x:{quote(token, safe='')}@", 1)

    async def start(self) -> None:
        """Check the store. Raises :class:`groundwire.train.store.health.StoreAddressError`."""
        await self.connection.start()

    async def close(self) -> None:
        """Close the connections; later requests raise ``RuntimeError``."""
        await self.connection.close()
        await super().close()

    stop = close

    async def _request_json(self, method: str, path: str, *, json: Any = None, params: Any = None) -> Any:
        reply = await self.connection.request(method, path, json=json, params=params)
        if path.endswith("/search") and json.get("limit") == -1:  # a store may return a list in pages
            page = reply["items"]
            while page and json["offset"] + len(reply["items"]) < reply["total"]:
                rest = {**json, "offset": json["offset"] + len(reply["items"])}
                page = (await self.connection.request(method, path, json=rest))["items"]
                reply["items"] += page
        return reply

    async def _dequeue_batch(self, *, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        request = {"limit": limit, "worker_id": worker_id}
        rollouts = await self._request_json("post", "/queues/rollouts/dequeue", json=request)
        return [AttemptedRollout.model_validate(rollout) for rollout in rollouts]

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Enqueue rollouts, in requests of a few megabytes."""
        enqueued: list[Rollout] = []
        part: list[EnqueueRolloutRequest] = []
        size = 0
        for rollout in rollouts:
            size += len(rollout.model_dump_json())
            if part and (size > MAX_BATCH_BYTES or len(part) == _MAX_ROLLOUTS):
                enqueued += await super().enqueue_many_rollouts(part)
                part, size = [], 0
            part.append(rollout)
        return [*enqueued, *await super().enqueue_many_rollouts(part)]

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> list[Rollout]:
        """The rollouts that have ended; ``timeout`` is at most 0.1 seconds."""
        ended: list[Rollout] = []
        for start in range(0, len(rollout_ids), _MAX_ROLLOUTS):
            part = rollout_ids[start : start + _MAX_ROLLOUTS]
            ended += await super().wait_for_rollouts(rollout_ids=part, timeout=timeout)
        return ended

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One sequence id for each (rollout, attempt), rising within a rollout."""
        if not self.connection.batches:
            return await super().get_many_span_sequence_ids(rollout_attempt_ids)
        return await self._request_json("post", "/spans/next/batch", json=rollout_attempt_ids)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Store spans; returns the new ones."""
        if not self.connection.batches:
            return await super().add_many_spans(spans)
        new = set(await self._request_json("post", "/spans/batch", json=list(spans)))
        return [span for span in spans if span.span_id in new]
