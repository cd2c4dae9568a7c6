"""Writes calls in the background: a reply never waits for the store, and no call is dropped while the store is away.

Sequence numbers are reserved in the order in which calls arrive, while the policy still samples, so that a reward
emitted after a reply always gets a higher number than the call. A task then builds the records of finished calls. Each
attempt is numbered and written by tasks of its own, so one that the store refuses, or fails at, does not hold up the
others. A write that fails is repeated, and what is stored already is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.spans import SinkRefusedError, SpanRecord, TraceSink
from groundwire.tools.errors import UserError

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0
_WRITE_DELAY_S = 0.05
"""How long finished calls are collected before they are written, unless a flush is waiting."""
_CANCEL_S = 0.1
_MAX_REFUSED = 1024
"""Rollouts whose refusal nobody has asked for; the oldest are forgotten."""
_BACKLOG = 256
"""With so many finished calls waiting, writing no longer yields to requests, so that memory stays bounded."""

T = TypeVar("T")
Record = LLMCall | SpanRecord


class CallsNotStoredError(UserError):
    """The store refused some calls, or did not accept them before the proxy stopped."""

    exit_code = 1


class _RefusedError(Exception):
    """The store does not take a record, or was given up."""


@dataclass(eq=False)
class _Attempt:
    """What is on the way to the store for one attempt: it lives as long as one of its places.

    A place ends when its call is stored, refused by the store, or given up by a flush that has waited long enough.
    """

    rollout_id: str
    attempt_id: str
    arrived: list[Place] = field(default_factory=list)
    """Places without a number."""
    is_numbering: bool = False
    is_writing: bool = False
    is_given_up: bool = False
    """The store's next error is a refusal, instead of a reason to try again."""
    last_error: Exception | None = None
    """Why the store did not answer the last time."""


@dataclass(slots=True, eq=False)
class Place:
    """The place of a call, or of another span, in the order of arrival of its attempt."""

    attempt: _Attempt
    sequence: int | None = None
    """None until a number is reserved."""
    make: Callable[[int], Record] | None = None
    """Builds the record from its number; None until the call has finished."""
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CallWriter:
    """Numbers calls in order of arrival and writes them once they are finished, on one event loop."""

    def __init__(self, sink: TraceSink) -> None:
        self._sink = sink
        self._attempts: WeakValueDictionary[tuple[str, str], _Attempt] = WeakValueDictionary()
        self._finished: dict[Place, None] = {}
        """In the order in which they finished, until they end."""
        self._refused: dict[str, Exception] = {}
        """By rollout, until a flush asks for it."""
        self._to_write, self._flushing = asyncio.Event(), asyncio.Event()
        self._flushes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._write())

    def reserve(self, rollout_id: str, attempt_id: str) -> Place:
        """Give a call its place in the order of arrival."""
        key = rollout_id, attempt_id
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = self._attempts[key] = _Attempt(rollout_id, attempt_id)
        place = Place(attempt)
        attempt.arrived.append(place)
        if not attempt.is_numbering:
            attempt.is_numbering = True
            self._start(self._number(attempt))
        return place

    def finish(self, place: Place, make: Callable[[int], Record]) -> None:
        """Queue a call to be written. Only the first time for a place counts."""
        if place.make is None and not place.ended.done():  # it has ended if the store refused to number it
            place.make = make
            self._finished[place] = None
            self._to_write.set()

    async def flush(self, rollout_id: str | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until all finished calls, or those of one rollout, are stored.

        Raises :class:`CallsNotStoredError` if some were refused, or are not stored after ``timeout_s`` seconds; then
        they are given up. A refusal is reported once.
        """
        waiting = [place for place in self._finished if rollout_id in (None, place.attempt.rollout_id)]
        await self._wait_for(waiting, timeout_s)
        refused = [refused_id for refused_id in self._refused if rollout_id in (None, refused_id)]
        errors = [self._refused.pop(refused_id) for refused_id in refused]
        if errors:
            raise CallsNotStoredError(f"the store refused a call of rollout {refused[0]}: {errors[0]}") from errors[0]
        if left := [place for place in waiting if not place.ended.done()]:
            error = _not_stored(left, timeout_s or 0.0)
            for place in left:
                place.attempt.is_given_up = True
                self._end(place)
            raise error

    async def close(self, *, timeout_s: float) -> None:
        """Write what is left and end. Raises :class:`CallsNotStoredError` with the count if time runs out."""
        await self._wait_for(self._finished, timeout_s)
        while self._tasks:  # asyncio.wait_for may lose a cancellation before Python 3.12
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_CANCEL_S)
        if self._finished:
            raise _not_stored(list(self._finished), timeout_s)

    async def _wait_for(self, places: Collection[Place], timeout_s: float | None) -> None:
        """Write finished calls at once until ``places`` have ended."""
        if not places:
            return
        self._flushes += 1
        self._flushing.set()
        try:
            await asyncio.wait([place.ended for place in places], timeout=timeout_s)
        finally:
            self._flushes -= 1
            if not self._flushes:
                self._flushing.clear()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _number(self, attempt: _Attempt) -> None:
        """Number the places of an attempt until none is left."""
        key = attempt.rollout_id, attempt.attempt_id
        while group := attempt.arrived:
            attempt.arrived = []
            try:
                numbers = await self._repeat(attempt, lambda: self._sink.reserve_sequence_ids([key] * len(group)))
            except _RefusedError as error:
                self._refuse(group, error)
                continue
            for place, number in zip(group, numbers, strict=True):
                place.sequence = number
            self._to_write.set()
        attempt.is_numbering = attempt.is_given_up = False

    async def _write(self) -> None:
        """Build the records of calls that have a number and are finished, and hand each attempt's to a task."""
        while True:
            await self._to_write.wait()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._flushing.wait(), _WRITE_DELAY_S)
            self._to_write.clear()
            ready = [place for place in self._finished if place.sequence is not None and not place.attempt.is_writing]
            groups: dict[_Attempt, list[tuple[Place, Record]]] = {}
            for place in ready:
                assert place.make is not None
                assert place.sequence is not None
                try:
                    groups.setdefault(place.attempt, []).append((place, place.make(place.sequence)))
                except Exception as error:  # the values of one call must not end the writing of the others
                    self._refuse([place], error)
                if len(ready) < _BACKLOG:
                    await asyncio.sleep(0)  # let requests go first
            for attempt, group in groups.items():
                attempt.is_writing = True
                self._start(self._add(attempt, group))

    async def _add(self, attempt: _Attempt, group: Sequence[tuple[Place, Record]]) -> None:
        """Add the calls of an attempt; its next ones wait until this is done."""
        places = [place for place, _ in group]
        calls = [record for _, record in group if isinstance(record, LLMCall)]
        spans = [record for _, record in group if isinstance(record, SpanRecord)]
        try:
            if calls:
                await self._repeat(attempt, lambda: self._sink.add_calls(calls))
            if spans:
                await self._repeat(attempt, lambda: self._sink.add_annotations(spans))
        except _RefusedError as error:
            self._refuse(places, error)
        attempt.is_writing = attempt.is_given_up = False
        attempt.last_error = None
        for place in places:
            self._end(place)
        self._to_write.set()

    def _end(self, place: Place) -> None:
        """A place ends once: it is stored, refused or given up."""
        self._finished.pop(place, None)
        if not place.ended.done():
            place.ended.set_result(None)

    def _refuse(self, group: Sequence[Place], error: Exception) -> None:
        rollout_id = group[0].attempt.rollout_id
        self._refused[rollout_id] = error
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        _log.error("the store refused %d calls of rollout %.100r: %s", len(group), rollout_id, error)
        for place in group:
            self._end(place)

    async def _repeat(self, attempt: _Attempt, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, which is repeated until it succeeds.

        Raises :class:`_RefusedError`, also if :meth:`flush` has given up the calls of the attempt.
        """
        delay = _FIRST_RETRY_S
        while True:
            try:
                return await work()
            except (ValueError, SinkRefusedError) as error:
                raise _RefusedError(str(error)) from error
            except Exception as error:
                if attempt.is_given_up:
                    raise _RefusedError(f"its last error: {error!r}") from error
                attempt.last_error = error
                _log.warning("the store failed (%r); trying again in %.2f s", error, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_S)


def _not_stored(left: Sequence[Place], timeout_s: float) -> CallsNotStoredError:
    last_error = next((place.attempt.last_error for place in left if place.attempt.last_error is not None), None)
    error = CallsNotStoredError(
        f"{len(left)} calls are not in the store after {timeout_s:g} s of trying; its last error: {last_error!r}"
    )
    error.__cause__ = last_error
    return error
