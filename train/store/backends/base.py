"""What our stores add to Agent Lightning's when an attempt ends, and the store in the trainer's memory."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from operator import attrgetter
from types import MethodType
from typing import Any

from agentlightning.store import collection_based as store_methods
from agentlightning.store.base import UNSET, LightningStore, is_finished
from agentlightning.store.collection import base as collection_methods
from agentlightning.store.collection.memory import InMemoryLightningCollections, ListBasedCollection
from agentlightning.store.collection_based import CollectionBasedLightningStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import Attempt, AttemptedRollout, Rollout, Span
from typing_extensions import Self

__all__ = ["IgnoreLateChanges", "MemoryStore", "NotifyAttemptEnd"]

_SPAN_BYTES = 4 << 30  # of the rollouts that run or were not read: the trainer drops the spans that it has read
_SPAN_OBJECT_BYTES, _ITEM_BYTES = 2048, 32


class NotifyAttemptEnd(LightningStore):
    """Base class of stores that call ``on_attempt_end`` with the rollout's id when a runner ends an attempt."""

    on_attempt_end: Callable[[str], None] | None = None

    async def update_attempt(self, rollout_id: str, attempt_id: str, **changes: Any) -> Any:
        """Change an attempt; returns the new attempt."""
        attempt = await super().update_attempt(rollout_id, attempt_id, **changes)
        if self.on_attempt_end is not None and attempt.status in ("succeeded", "failed"):
            self.on_attempt_end(rollout_id)
        return attempt


class IgnoreLateChanges(CollectionBasedLightningStore[Any]):
    """Base class of stores in which an ended attempt or rollout stays as it ended.

    Agent Lightning treats a late span as a heartbeat: the attempt runs again, and a rollout that waits for its next
    attempt is marked as running, so no runner takes it until it times out. Late spans are common: the proxy writes the
    call that an interrupted agent had begun. And the last status wins: a rollout that succeeds at the deadline becomes
    cancelled, and a cancelled one returns to the queue when its attempt fails. Here only a new start changes it.
    """

    async def _unlocked_update_rollout_only(
        self, collections: Any, rollout_id: str, *, status: Any = UNSET, **changes: Any
    ) -> Any:
        rollout = await collections.rollouts.get({"rollout_id": {"exact": rollout_id}})
        current = None if rollout is None else rollout.status
        final = current in ("succeeded", "cancelled") and status not in ("queuing", "preparing")
        if final or (current == "failed" and status == "cancelled"):
            status = UNSET
        return await super()._unlocked_update_rollout_only(collections, rollout_id, status=status, **changes)

    async def _on_attempt_heartbeat(self, rollout_id: str, attempt_id: str) -> Any:
        key: Any = {"rollout_id": {"exact": rollout_id}, "attempt_id": {"exact": attempt_id}}
        attempt = await self.collections.attempts.get(key)
        if attempt is None or attempt.status in ("failed", "succeeded", "timeout"):
            return None
        return await super()._on_attempt_heartbeat(rollout_id, attempt_id)


def _without_metrics(kind: type, tracked: Callable[[str], Any]) -> dict[str, Any]:
    """The methods of ``kind`` that ``tracked`` wraps, as they were before.

    Agent Lightning's wrappers cost time also when nobody collects its metrics.
    """
    wrapper = tracked("")(lambda: None).__code__
    methods: list[tuple[str, Any]] = inspect.getmembers(kind, inspect.isfunction)
    return {name: method.__wrapped__ for name, method in methods if method.__code__ is wrapper}


class _Store(InMemoryLightningStore):
    """Agent Lightning's store without metrics."""


for _name, _method in _without_metrics(InMemoryLightningStore, store_methods.tracked).items():
    setattr(_Store, _name, _method)


class MemoryStore(NotifyAttemptEnd, IgnoreLateChanges, _Store):
    """Agent Lightning's in-memory store, for one event loop; beyond ``span_bytes`` it drops the oldest spans."""

    collections: _Collections

    def __init__(self, *, span_bytes: int = _SPAN_BYTES) -> None:
        super().__init__(
            eviction_memory_threshold=span_bytes,
            safe_memory_threshold=span_bytes // 2,
            span_size_estimator=_estimate_bytes,
        )
        self.collections = _Collections()

    async def drop_spans(self, rollout_id: str) -> None:
        """Remove a rollout's spans. A later query of them raises ``RuntimeError``."""
        await self._evict_spans_for_rollout(self.collections, rollout_id)

    async def _unlocked_get_latest_attempt(self, collections: Any, rollout_id: str) -> Attempt | None:
        return self.collections.newest_attempt(rollout_id)

    async def _unlocked_rollout_to_attempted_rollout(self, collections: Any, rollout: Rollout) -> Rollout:
        attempt = self.collections.newest_attempt(rollout.rollout_id)
        return rollout if attempt is None else AttemptedRollout.model_construct(**dict(rollout), attempt=attempt)

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> list[Rollout]:
        """The rollouts that have ended. Agent Lightning starts a task for each, also if nobody waits."""
        if timeout != 0:
            return await super().wait_for_rollouts(rollout_ids=rollout_ids, timeout=timeout)
        await self._scan_for_unhealthy_rollouts()
        rollouts = await self._unlocked_query_rollouts_by_rollout_ids(self.collections, rollout_ids)
        return [rollout for rollout in rollouts if is_finished(rollout)]


class _Collections(InMemoryLightningCollections):
    """Without locks and metrics, which were half of the work of each request.

    No method of in-memory collections suspends, so on one event loop each operation is atomic without a lock.
    """

    def __init__(self) -> None:
        super().__init__(lock_type="asyncio")
        self._rollouts = _Collection(items=[], item_type=Rollout, primary_keys=["rollout_id"])
        self._attempts = _Collection(items=[], item_type=Attempt, primary_keys=["rollout_id", "attempt_id"])
        for part in vars(self).values():
            if isinstance(part, collection_methods.TrackedCollection):
                for name, method in _without_metrics(type(part), collection_methods.tracked).items():
                    setattr(part, name, MethodType(method, part))

    def newest_attempt(self, rollout_id: str) -> Attempt | None:
        """The last attempt of a rollout, or None."""
        return max(self._attempts.below(rollout_id), key=attrgetter("sequence_id"), default=None)

    def atomic(self, **options: Any) -> AbstractAsyncContextManager[Self]:
        """These collections."""
        return nullcontext(self)


class _Collection(ListBasedCollection[Any]):
    """Finds the item of a key without Agent Lightning's search, which is for filters of any kind."""

    def below(self, first: str) -> Iterable[Any]:
        """The items whose first of two keys is ``first``."""
        items: Any = self._items.get(first, {})
        return list(items.values())

    async def get(self, filter: Any = None, sort: Any = None) -> Any:
        """The first item of a filter, or None."""
        conditions = [(filter or {}).get(name, {}) for name in self._primary_keys]
        if len(filter or {}) > len(conditions) or any(each.keys() != {"exact"} for each in conditions):
            return await _search(self, filter, sort)
        item: Any = self._items
        for condition in conditions:
            item = item.get(condition["exact"])
            if item is None:
                break
        return item


_search: Any = _without_metrics(ListBasedCollection, collection_methods.tracked).get("get", ListBasedCollection.get)


def _estimate_bytes(span: Span) -> int:
    """Agent Lightning's own estimate visits every number of a list."""
    values = span.attributes.values()
    items = sum(len(value) for value in values if isinstance(value, list))
    return _SPAN_OBJECT_BYTES + _ITEM_BYTES * items + sum(map(sys.getsizeof, values))
