"""The client of a store behind HTTP, ours or Agent Lightning's, for trainers and runners.

It needs the base of groundwire only, so runners work in the environment of an agent, whose packages need not fit those
of the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import pydantic_core

from groundwire.adapters.tracing import LLMCall, to_span
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.tools.daemon_threads import in_thread
from groundwire.train.store.agent_lightning import (
    outcome_span,
    read_record,
    read_resources,
    read_rollout,
    read_span,
    request_json,
    resources_json,
    span_json,
)
from groundwire.train.store.base import RolloutStore, without_secrets
from groundwire.train.store.connection import MAX_BATCH_BYTES, StoreConnection
from groundwire.train.store.errors import StoreFailedError
from groundwire.train.store.rollout import ENDED, UNFINISHED, Outcome, Rollout, RolloutStatus

_MAX_ITEMS = 1000
_PAGE = 250
"""Items that our store reads at once: others wait for a few milliseconds."""


class RemoteStore(StoreConnection, RolloutStore):
    """A :class:`groundwire.train.store.base.RolloutStore` behind HTTP. Call :meth:`start` before use.

    A reply that is no JSON of Agent Lightning 0.3 is a ``ValueError``, and so is a refused request. Of a rollout's
    attempts only the last is known.
    """

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """As :meth:`RolloutStore.enqueue`, in requests of a few megabytes."""
        requests = [request_json(rollout) for rollout in rollouts]
        enqueued: list[Rollout] = []
        for chunk in _chunks(requests):
            reply = await self.request("post", "/queues/rollouts/enqueue", json={"rollouts": chunk})
            enqueued += map(read_rollout, reply)
        for rollout, known in zip(rollouts, enqueued, strict=True):
            rollout.rollout_id, rollout.started, rollout.status = known.rollout_id, known.started, known.status

    async def dequeue(self, limit: int, worker_id: str | None = None) -> Sequence[Rollout]:
        request = {"limit": limit, "worker_id": worker_id}
        taken = [read_rollout(value) for value in await self.request("post", "/queues/rollouts/dequeue", json=request)]
        if not all(rollout.attempts for rollout in taken):
            raise ValueError("the store gave a rollout without an attempt")
        return taken

    async def get(self, rollout_id: str, *, with_calls: bool = True) -> Rollout | None:
        value = await self.request("get", f"/rollouts/{_quoted(rollout_id)}")
        if value is None:
            return None
        rollout = read_rollout(value)
        if with_calls and rollout.attempts:
            of_attempt = {"rollout_id": rollout_id, "attempt_id": rollout.attempts[-1].attempt_id}
            spans = [span async for span in self._search("/spans/search", of_attempt)]
            read = in_thread(lambda: read_record([read_span(span) for span in spans]), name="spans")
            rollout.calls, rollout.annotations, rollout.outcome = await asyncio.wrap_future(read)
        return rollout

    async def ended(self, rollout_ids: Collection[str]) -> Sequence[str]:
        ended: list[str] = []
        for chunk in _chunks(list(rollout_ids)):
            reply = await self.request("post", "/waits/rollouts", json={"rollout_ids": chunk, "timeout": 0})
            ended += [rollout["rollout_id"] for rollout in reply]
        return ended

    async def count(self, rollout_ids: Collection[str], statuses: Collection[RolloutStatus] | None = None) -> int:
        total = 0
        for chunk in _chunks(list(rollout_ids)):
            search: dict[str, Any] = {"rollout_id_in": chunk, "limit": 1}
            if statuses is not None:
                search["status_in"] = list(statuses)
            total += (await self.request("post", "/rollouts/search", json=search))["total"]
        return total

    async def unfinished(self, resources_id: str) -> Sequence[str]:
        rollouts = self._search("/rollouts/search", {"status_in": UNFINISHED})
        return [rollout["rollout_id"] async for rollout in rollouts if rollout["resources_id"] == resources_id]

    async def cancel(self, rollout_id: str) -> None:
        await self.request("post", f"/rollouts/{_quoted(rollout_id)}", json={"status": "cancelled"})

    async def heartbeat(self, rollout_id: str, attempt_id: str, at: float) -> bool:
        rollout = await self.get(rollout_id, with_calls=False)
        if rollout is None or not rollout.attempts or rollout.attempts[-1].attempt_id != attempt_id:
            return False
        if rollout.status in ENDED or rollout.attempts[-1].status in ENDED:
            return False  # Agent Lightning's store would set it to running again
        worker = {"worker_id": worker_id} if (worker_id := rollout.attempts[-1].worker_id) else {}  # a sign of its life
        await self._update_attempt(rollout_id, attempt_id, last_heartbeat_time=at, **worker)
        return True

    async def end_attempt(self, rollout_id: str, attempt_id: str, outcome: Outcome | None, *, failed: bool) -> None:
        """As :meth:`RolloutStore.end_attempt`. An attempt whose outcome the store refuses has failed."""
        if outcome is not None:
            try:
                [number] = await self.reserve_sequence_ids([(rollout_id, attempt_id)])
                await self._add([outcome_span(without_secrets(outcome, self._mask), rollout_id, attempt_id, number)])
            except (ValueError, StoreFailedError):
                failed = True
        await self._update_attempt(rollout_id, attempt_id, status="failed" if failed else "succeeded")

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        if self.batches:
            return await self.request("post", "/spans/next/batch", json=attempts)
        requests = [dict(zip(("rollout_id", "attempt_id"), ids, strict=True)) for ids in attempts]
        return [(await self.request("post", "/spans/next", json=request))["sequence_id"] for request in requests]

    async def add_calls(self, calls: Sequence[LLMCall]) -> None:
        await self._add([to_span(without_secrets(call, self._mask)) for call in calls])

    async def add_annotations(self, spans: Sequence[SpanRecord]) -> None:
        await self._add([without_secrets(span, self._mask) for span in spans])

    async def signs_of_life(self) -> Mapping[str, Any]:
        """As :meth:`RolloutStore.signs_of_life`, of those that took rollouts last."""
        search = {"sort_by": "last_dequeue_time", "sort_order": "desc", "limit": _MAX_ITEMS}
        page = await self.request("post", "/workers/search", json=search)
        return {worker["worker_id"]: worker for worker in page["items"]}

    async def put_resources(self, resources_id: str, resources: Mapping[str, Any]) -> None:
        await self.request("post", f"/resources/{_quoted(resources_id)}", json=resources_json(resources))

    async def get_resources(self, resources_id: str | None) -> Mapping[str, Any] | None:
        path = "/resources/latest" if resources_id is None else f"/resources/{_quoted(resources_id)}"
        update = await self.request("get", path)
        return None if update is None else read_resources(update)

    async def forget(self, rollout_id: str) -> None:
        """Nothing: the store keeps its rollouts, or has an option that deletes old ones."""

    async def _update_attempt(self, rollout_id: str, attempt_id: str, **changes: Any) -> None:
        await self.request("post", f"/rollouts/{_quoted(rollout_id)}/attempts/{_quoted(attempt_id)}", json=changes)

    async def _add(self, spans: Sequence[SpanRecord]) -> None:
        for chunk in _chunks([span_json(span) for span in spans]):
            if self.batches:
                await self.request("post", "/spans/batch", json=chunk)
            else:
                for span in chunk:
                    await self.request("post", "/spans", json=span)

    async def _search(self, path: str, filters: Mapping[str, Any]) -> Any:
        """All items of a list, which a store may return in pages. Ours says where the next one begins; to Agent
        Lightning's an offset does, which takes it longer with each page.
        """
        start: dict[str, Any] | None = {"after": 0} if self.batches else {"offset": 0}
        while start is not None:
            page = await self.request("post", path, json={**filters, "limit": _PAGE if self.batches else -1, **start})
            for item in page["items"]:
                yield item
            end = start.get("offset", 0) + len(page["items"])
            if "next" in page:
                start = {"after": page["next"]}
            else:  # the last one, or of a store that knows no "after"
                start = {"offset": end} if page["items"] and end < page.get("total", end) else None


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """``items`` in chunks of a size that a store accepts in one request."""
    chunk: list[Any] = []
    size = 0
    for item in items:
        length = len(pydantic_core.to_json(item))
        if chunk and (size + length > MAX_BATCH_BYTES or len(chunk) == _MAX_ITEMS):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += length
    if chunk:
        yield chunk
