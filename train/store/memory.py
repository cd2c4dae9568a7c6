"""A store in the memory of the trainer's process: its runners, proxy and trainer hand on the same objects."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing.calls import LLMCall, order_calls
from groundwire.adapters.tracing.spans import SpanRecord, span_size
from groundwire.tools.daemon_threads import in_thread
from groundwire.train.store.base import StateMachine, attempt_of, without_secrets
from groundwire.train.store.rollout import Attempt, Outcome, Rollout

_SCAN_S = 0.1
_MANY = 1000
"""Calls and annotations that take some milliseconds to put into order."""
_Item = LLMCall | SpanRecord


def _size(item: _Item) -> int:
    """About how many bytes it takes in a store of another process."""
    if isinstance(item, SpanRecord):
        return span_size(item.attributes)
    texts = len(item.messages_json) + len(item.tools_json) + len(item.reply_json)
    return texts + 5 * (len(item.prompt_ids) + 2 * len(item.response_ids))


class MemoryStore(StateMachine):
    """A :class:`groundwire.train.store.base.RolloutStore` of plain objects. :meth:`get` returns the enqueued object."""

    def __init__(self) -> None:
        super().__init__(scan_s=_SCAN_S)
        self._rollouts: dict[str, Rollout] = {}
        self._queue: deque[str] = deque()
        self._numbers: dict[str, int] = {}
        self._resources: dict[str, Mapping[str, Any]] = {}
        self._items: dict[str, dict[tuple[Any, ...], _Item]] = {}
        """The calls and annotations of each rollout."""
        self._forgotten: set[str] = set()

    async def end_attempt(self, rollout_id: str, attempt_id: str, outcome: Outcome | None, *, failed: bool) -> None:
        if rollout_id not in self._forgotten:  # it was cancelled at its deadline
            await super().end_attempt(rollout_id, attempt_id, outcome, failed=failed)

    async def reserve_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        numbers = []
        for rollout_id, _ in attempts:
            numbers.append(self._numbers.get(rollout_id, 0) + 1)
            if rollout_id not in self._forgotten:
                self._numbers[rollout_id] = numbers[-1]
        return numbers

    async def add_calls(self, calls: Sequence[LLMCall]) -> None:
        for call in calls:
            self._add((call.attempt_id, call.sequence, call.choice), call)

    async def add_annotations(self, spans: Sequence[SpanRecord]) -> None:
        for span in spans:
            self._add((span.attempt_id, span.span_id), span)

    async def put_resources(self, resources_id: str, resources: Mapping[str, Any]) -> None:
        self._resources.pop(resources_id, None)  # the newest is the last
        self._resources[resources_id] = dict(resources)

    async def get_resources(self, resources_id: str | None) -> Mapping[str, Any] | None:
        if resources_id is not None:
            return self._resources.get(resources_id)
        return next(reversed(self._resources.values()), None)

    async def forget(self, rollout_id: str) -> None:
        """As :meth:`RolloutStore.forget`. Late calls of the rollout are accepted and dropped."""
        if self._rollouts.pop(rollout_id, None) is not None:
            self._forgotten.add(rollout_id)
            self._items.pop(rollout_id, None)
            self._numbers.pop(rollout_id, None)

    def _add(self, key: tuple[Any, ...], item: _Item) -> None:
        rollout_id = item.rollout_id
        if rollout_id in self._forgotten:
            return
        rollout = self._known(rollout_id)
        attempt = attempt_of(rollout, item.attempt_id)
        items = self._items.setdefault(rollout_id, {})
        if key in items:
            return
        item = without_secrets(item, self._mask)
        if not self._has_room(rollout, attempt, _size(item)):
            return
        items[key] = item
        number = item.sequence if isinstance(item, LLMCall) else item.sequence_id
        self._numbers[rollout_id] = max(number, self._numbers.get(rollout_id, 0))
        self._note_calls(rollout, attempt)

    async def _with_calls(self, rollout: Rollout) -> Rollout:
        if not rollout.attempts:
            return rollout
        last, items = rollout.attempts[-1].attempt_id, list(self._items.get(rollout.rollout_id, {}).values())

        def read() -> tuple[list[LLMCall], list[SpanRecord]]:
            of_attempt = [item for item in items if item.attempt_id == last]
            annotations = [item for item in of_attempt if isinstance(item, SpanRecord)]
            return order_calls((item for item in of_attempt if isinstance(item, LLMCall)), annotations), annotations

        many = len(items) > _MANY
        rollout.calls, rollout.annotations = (
            await asyncio.wrap_future(in_thread(read, name="spans")) if many else read()
        )
        return rollout

    def _set_outcome(self, rollout: Rollout, attempt: Attempt, outcome: Outcome) -> None:
        if attempt is rollout.attempts[-1]:
            rollout.outcome = without_secrets(outcome, self._mask)

    def _find(self, rollout_id: str) -> Rollout | None:
        return self._rollouts.get(rollout_id)

    def _in_status(self, statuses: Collection[str]) -> Iterable[Rollout]:
        return [rollout for rollout in self._rollouts.values() if rollout.status in statuses]

    def _insert(self, rollout: Rollout) -> None:
        self._rollouts[rollout.rollout_id] = rollout

    def _save(self, rollout: Rollout) -> None:
        pass

    def _push(self, rollout_id: str) -> None:
        self._queue.append(rollout_id)

    def _pop(self) -> str | None:
        return self._queue.popleft() if self._queue else None
