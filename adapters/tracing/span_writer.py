"""Writes spans in the background: a reply never waits for the store, and no span is dropped while the store is away.

Sequence numbers are reserved in the order in which calls arrive, while the policy still samples, so that a reward
emitted after a reply always gets a higher number than the call. A task then builds the spans of finished calls. Each
attempt is numbered and written by tasks of its own, so one that the store refuses, or fails at, does not hold up the
others. A write that fails is repeated with the same span ids, and spans that are stored already are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from groundwire.adapters.tracing.spans import SpanRecord, SpansRefusedError, SpanStore
from groundwire.tools.errors import UserError

__all__ = ["MakeSpan", "PendingSpan", "SpanWriter", "SpansNotStoredError"]

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0
_WRITE_DELAY_S = 0.05
"""How long finished calls are collected before they are written, unless a flush is waiting."""
_REFUSED = -1
_CANCEL_S = 0.1
_MAX_REFUSED = 1024
"""Rollouts whose refusal nobody has asked for; the oldest are forgotten."""
_BACKLOG = 256
"""With so many finished calls waiting, writing no longer yields to requests, so that memory stays bounded."""

T = TypeVar("T")
_Attempt = tuple[str, str]
"""Rollout id and attempt id."""
MakeSpan = Callable[[int], SpanRecord]
"""Builds a span from its sequence number."""


class SpansNotStoredError(UserError):
    """The store refused the spans of some calls, or did not accept them before the proxy stopped."""

    exit_code = 1


@dataclass(slots=True, eq=False)
class PendingSpan:
    """A span from its arrival until it is stored."""

    rollout_id: str
    attempt_id: str
    sequence: int = 0
    """0 until a number is reserved, -1 if it is refused."""
    make: MakeSpan | None = None
    """None until the call has finished."""
    record: SpanRecord | None = None
    stored: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def attempt(self) -> _Attempt:
        """Rollout id and attempt id."""
        return self.rollout_id, self.attempt_id


class SpanWriter:
    """Numbers spans in order of arrival and writes them once they are finished, on one event loop."""

    def __init__(self, sink: SpanStore) -> None:
        self._sink = sink
        self._arrived: dict[_Attempt, list[PendingSpan]] = {}
        self._numbering: set[_Attempt] = set()
        self._writing: set[_Attempt] = set()
        self._finished: dict[PendingSpan, None] = {}
        self._to_write, self._flushing = asyncio.Event(), asyncio.Event()
        self._flushes = 0
        self._refused: dict[str, Exception] = {}
        self._last_errors: dict[_Attempt, Exception] = {}
        self._given_up: set[_Attempt] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._write())

    def reserve(self, rollout_id: str, attempt_id: str) -> PendingSpan:
        """Give a span its place in the order of arrival."""
        pending = PendingSpan(rollout_id, attempt_id)
        self._arrived.setdefault(pending.attempt, []).append(pending)
        if pending.attempt not in self._numbering:
            self._numbering.add(pending.attempt)
            self._start(self._number(pending.attempt))
        return pending

    def finish(self, pending: PendingSpan, make: MakeSpan) -> None:
        """Queue a reserved span to be written. Only the first call for a span counts."""
        if pending.make is None:
            pending.make = make
            self._finished[pending] = None
            self._to_write.set()

    async def flush(self, rollout_id: str | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until all finished spans, or those of one rollout, are stored.

        Raises :class:`SpansNotStoredError` if some were refused, or are not stored after ``timeout_s`` seconds; then
        they are given up. A refusal is reported once.
        """
        waiting = [p for p in self._finished if rollout_id in (None, p.rollout_id)]
        if waiting:
            with self._without_delay():
                await asyncio.wait([p.stored for p in waiting], timeout=timeout_s)
        refused = [each for each in self._refused if rollout_id in (None, each)]
        errors = [self._refused.pop(each) for each in refused]
        if errors:
            raise SpansNotStoredError(f"the store refused a call of rollout {refused[0]}: {errors[0]}") from errors[0]
        if left := [p for p in waiting if not p.stored.done()]:
            self._given_up.update(p.attempt for p in left)
            self._end(left)
            raise self._not_stored(left, timeout_s or 0.0)

    async def close(self, *, timeout_s: float) -> None:
        """Write what is left and end. Raises :class:`SpansNotStoredError` with the count if time runs out."""
        if self._finished:
            with self._without_delay():
                await asyncio.wait([p.stored for p in self._finished], timeout=timeout_s)
        while self._tasks:  # asyncio.wait_for may lose a cancellation before Python 3.12
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_CANCEL_S)
        if self._finished:
            raise self._not_stored(list(self._finished), timeout_s)

    @contextlib.contextmanager
    def _without_delay(self) -> Iterator[None]:
        """Write finished spans at once."""
        self._flushes += 1
        self._flushing.set()
        try:
            yield
        finally:
            self._flushes -= 1
            if not self._flushes:
                self._flushing.clear()

    def _not_stored(self, left: Sequence[PendingSpan], timeout_s: float) -> SpansNotStoredError:
        last_error = next((self._last_errors[p.attempt] for p in left if p.attempt in self._last_errors), None)
        error = SpansNotStoredError(
            f"{len(left)} calls are not in the store after {timeout_s:g} s of trying; its last error: {last_error!r}"
        )
        error.__cause__ = last_error
        return error

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _number(self, attempt: _Attempt) -> None:
        """Number the spans of an attempt until none is left."""
        while group := self._arrived.pop(attempt, None):
            try:
                numbers = await self._repeat(attempt, lambda: self._sink.reserve_sequence_ids([attempt] * len(group)))
            except SpansRefusedError as error:
                self._refuse(group, error)
                numbers = [_REFUSED] * len(group)
            for pending, number in zip(group, numbers, strict=True):
                pending.sequence = number
            self._to_write.set()
        self._numbering.discard(attempt)
        self._given_up.discard(attempt)

    async def _write(self) -> None:
        while True:
            await self._to_write.wait()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._flushing.wait(), _WRITE_DELAY_S)
            self._to_write.clear()
            ready = [p for p in self._finished if p.sequence and p.attempt not in self._writing]
            for pending in ready:
                self._make_record(pending)
                if len(ready) < _BACKLOG:
                    await asyncio.sleep(0)  # let requests go first
            for group in _by_attempt(ready):
                self._writing.add(group[0].attempt)
                self._start(self._write_group(group))

    def _make_record(self, pending: PendingSpan) -> None:
        assert pending.make is not None
        if pending.sequence == _REFUSED:
            return
        try:
            pending.record = pending.make(pending.sequence)
        except Exception as error:  # the values of one call must not end the writing of the others
            self._refuse([pending], error)

    async def _write_group(self, group: Sequence[PendingSpan]) -> None:
        """Add the spans of an attempt; the next ones of the attempt wait until it is done."""
        attempt, records = group[0].attempt, [p.record for p in group if p.record is not None]
        try:
            if records:
                await self._repeat(attempt, lambda: self._sink.add_spans(records))
        except SpansRefusedError as error:
            self._refuse(group, error)
        self._end(group)
        self._writing.discard(attempt)
        self._given_up.discard(attempt)
        self._last_errors.pop(attempt, None)
        self._to_write.set()

    def _end(self, group: Sequence[PendingSpan]) -> None:
        for pending in group:
            if self._finished.pop(pending, pending) is None:
                pending.stored.set_result(None)

    def _refuse(self, group: Sequence[PendingSpan], error: Exception) -> None:
        rollout_id = group[0].rollout_id
        self._refused[rollout_id] = error
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        _log.error("the store refused %d calls of rollout %.100r: %s", len(group), rollout_id, error)

    async def _repeat(self, attempt: _Attempt, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, which is repeated until it succeeds.

        Raises :class:`SpansRefusedError`, also if :meth:`flush` has given up the spans of the attempt.
        """
        delay = _FIRST_RETRY_S
        while True:
            try:
                return await work()
            except SpansRefusedError:
                raise
            except Exception as error:
                if attempt in self._given_up:
                    raise SpansRefusedError(f"its last error: {error!r}") from error
                self._last_errors[attempt] = error
                _log.warning("the store failed (%r); trying again in %.2f s", error, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_S)


def _by_attempt(spans: Sequence[PendingSpan]) -> list[list[PendingSpan]]:
    groups: dict[_Attempt, list[PendingSpan]] = defaultdict(list)
    for pending in spans:
        groups[pending.attempt].append(pending)
    return list(groups.values())
