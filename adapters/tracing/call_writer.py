"""Writes calls in the background: a reply never waits for the store, and no call is dropped while the store is away.

Sequence numbers are reserved in the order in which calls arrive, while the policy still samples, so that a reward
emitted after a reply always gets a higher number than the call. Each attempt has a task that reserves the numbers of
the calls that have come meanwhile, and each call one that writes it, so what the store refuses, or fails at, holds up
only its attempt. A write that fails is repeated, and what is stored already is skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.spans import CallSink, SinkRefusedError, SpanRecord
from groundwire.tools.errors import UserError

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0
_CANCEL_S = 0.1
_MAX_NUMBERED = 200  # most numbers in one request
_MAX_REFUSED = 1024  # rollouts whose refusal nobody has asked for; the oldest are forgotten

T = TypeVar("T")
Record = LLMCall | SpanRecord


class CallsNotStoredError(UserError):
    """The store refused some calls, or did not accept them before the proxy stopped."""

    exit_code = 1


@dataclass(slots=True, eq=False)
class Place:
    """The place of a call, or of another span, in the order of arrival of its attempt."""

    attempt: tuple[str, str]
    number: asyncio.Future[int | None]
    """None if the store refuses it."""
    has_finished: bool = False
    last_error: Exception | None = None
    """Why the store did not answer the last time."""


class CallWriter:
    """Numbers calls in order of arrival and writes them once they are finished, on one event loop.

    ``store`` is the method of ``sink`` for calls, or that for annotations.
    """

    def __init__(self, sink: CallSink, store: Callable[[Sequence[Any]], Awaitable[None]]) -> None:
        self._sink, self._store = sink, store
        self._unnumbered: dict[tuple[str, str], list[Place]] = {}
        """By attempt, in the order of arrival, while a task numbers them."""
        self._finished: dict[Place, asyncio.Task[None]] = {}
        """What writes the finished calls, until they are stored, refused by the store, or given up."""
        self._refused: dict[str, Exception] = {}  # by rollout, until a flush asks for it
        self._tasks: set[asyncio.Task[Any]] = set()

    def reserve(self, rollout_id: str, attempt_id: str) -> Place:
        """Give a call its place in the order of arrival."""
        place = Place((rollout_id, attempt_id), asyncio.get_running_loop().create_future())
        waiting = self._unnumbered.setdefault(place.attempt, [])
        waiting.append(place)
        if len(waiting) == 1:
            self._start(self._number(place.attempt))
        return place

    def finish(self, place: Place, make: Callable[[int], Record]) -> None:
        """Write the record that ``make`` builds from the number. Only the first time for a place counts."""
        if not place.has_finished:
            place.has_finished = True
            self._finished[place] = self._start(self._write(place, make))

    async def flush(self, rollout_id: str | None = None, *, timeout_s: float | None = None) -> None:
        """Wait until all finished calls, or those of one rollout, are stored.

        Raises :class:`CallsNotStoredError` if some were refused, or are not stored after ``timeout_s`` seconds; then
        they are given up. A refusal is reported once.
        """
        left = await self._wait([p for p in self._finished if rollout_id in (None, p.attempt[0])], timeout_s)
        refused = [refused_id for refused_id in self._refused if rollout_id in (None, refused_id)]
        errors = [self._refused.pop(refused_id) for refused_id in refused]
        if errors:
            raise CallsNotStoredError(f"the store refused a call of rollout {refused[0]}: {errors[0]}") from errors[0]
        if left:
            for place in left:
                self._finished.pop(place).cancel()
            raise _not_stored(left, timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """Write what is left and end. Raises :class:`CallsNotStoredError` with the count if time runs out."""
        left = await self._wait(list(self._finished), timeout_s)
        while self._tasks:  # asyncio.wait_for may lose a cancellation before Python 3.12
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_CANCEL_S)
        if left:
            raise _not_stored(left, timeout_s)

    async def _wait(self, places: Collection[Place], timeout_s: float | None) -> list[Place]:
        """Those of ``places`` that are not stored after ``timeout_s``."""
        if places:
            await asyncio.wait([self._finished[place] for place in places], timeout=timeout_s)
        return [place for place in places if place in self._finished]

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _number(self, attempt: tuple[str, str]) -> None:
        waiting = self._unnumbered[attempt]
        while places := waiting[:_MAX_NUMBERED]:
            work = partial(self._sink.reserve_sequence_ids, [attempt] * len(places))
            numbers: Sequence[int | None] | None = await self._repeat(places, work)
            for place, number in zip(places, numbers or [None] * len(places), strict=True):
                if not place.number.done():  # the writing of one that was given up is cancelled
                    place.number.set_result(number)
            del waiting[: len(places)]
        del self._unnumbered[attempt]

    async def _write(self, place: Place, make: Callable[[int], Record]) -> None:
        if (number := await place.number) is not None:
            try:
                record = make(number)
            except Exception as error:  # the values of one call must not end the writing of the others
                self._refuse(place, error)
            else:
                await self._repeat([place], partial(self._store, [record]))
        self._finished.pop(place, None)

    def _refuse(self, place: Place, error: Exception) -> None:
        rollout_id = place.attempt[0]
        self._refused[rollout_id] = error
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        _log.error("the store refused a call of rollout %.100r: %s", rollout_id, error)

    async def _repeat(self, places: Sequence[Place], work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of ``work`` for ``places``, repeated until it succeeds; None if the store refuses it."""
        delay = _FIRST_RETRY_S
        while True:
            try:
                return await work()
            except (ValueError, SinkRefusedError) as error:
                self._refuse(places[0], error)
                return None
            except Exception as error:
                for place in places:
                    place.last_error = error
                _log.warning("the store failed (%r); trying again in %.2f s", error, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_S)


def _not_stored(left: Sequence[Place], timeout_s: float | None) -> CallsNotStoredError:
    last_error = next((place.last_error for place in left if place.last_error is not None), None)
    error = CallsNotStoredError(
        f"{len(left)} calls are not in the store after {timeout_s or 0:g} s of trying; its last error: {last_error!r}"
    )
    error.__cause__ = last_error
    return error
