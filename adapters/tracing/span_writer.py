"""Writes spans in the background: a reply never waits for the store, and no span is dropped while the store is away.

Two tasks share the work. The first reserves sequence numbers in the order in which calls arrive, while the policy still
samples, so that a reward emitted after a reply always gets a higher number than the call. The second builds the spans
of finished calls and adds them. Rollouts are written separately, so one that is refused does not hold up the others. A
write that fails is repeated with the same span ids, and spans that are stored already are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from groundwire.adapters.tracing.spans import SpanRecord, SpanSink, SpansRefusedError
from groundwire.tools.errors import UserError

__all__ = ["MakeSpan", "PendingSpan", "SpanWriter", "SpansNotStoredError"]

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0
_WRITE_DELAY_S = 0.005
"""How long finished calls are collected before they are written, unless a flush is waiting."""
_BACKLOG = 256
"""With so many finished calls waiting, writing no longer yields to requests, so that memory stays bounded."""

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
    """0 until a number is reserved."""
    make: MakeSpan | None = None
    """None until the call has finished."""
    record: SpanRecord | None = None
    stored: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def attempt(self) -> tuple[str, str]:
        """Rollout id and attempt id."""
        return self.rollout_id, self.attempt_id


class SpanWriter:
    """Numbers spans in order of arrival and writes them once they are finished, on one event loop."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink
        self._arrived: list[PendingSpan] = []
        self._finished: dict[PendingSpan, None] = {}
        self._to_number, self._to_write, self._flushing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._refused: dict[str, Exception] = {}
        self._last_error: Exception | None = None
        self._tasks = [asyncio.create_task(self._number()), asyncio.create_task(self._write())]

    def reserve(self, rollout_id: str, attempt_id: str) -> PendingSpan:
        """Give a span its place in the order of arrival."""
        pending = PendingSpan(rollout_id, attempt_id)
        self._arrived.append(pending)
        self._to_number.set()
        return pending

    def finish(self, pending: PendingSpan, make: MakeSpan) -> None:
        """Queue a reserved span to be written. Only the first call for a span counts."""
        if pending.make is None:
            pending.make = make
            self._finished[pending] = None
            self._to_write.set()

    async def flush(self, rollout_id: str | None = None) -> None:
        """Wait until all finished spans, or those of one rollout, are stored.

        Raises :class:`SpansNotStoredError` if some were refused.
        """
        waiting = [p.stored for p in self._finished if rollout_id is None or p.rollout_id == rollout_id]
        if waiting:
            self._flushing.set()
            await asyncio.gather(*map(asyncio.shield, waiting))
        for refused, error in self._refused.items():
            if rollout_id in (None, refused):
                raise SpansNotStoredError(f"the store refused a call of rollout {refused}: {error}") from error

    async def close(self, *, timeout_s: float) -> None:
        """Write what is left and end. Raises :class:`SpansNotStoredError` with the count if time runs out."""
        if self._finished:
            self._flushing.set()
            await asyncio.wait([p.stored for p in self._finished], timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._finished:
            raise SpansNotStoredError(
                f"{len(self._finished)} calls are not in the store after {timeout_s:g} s of trying; "
                f"its last error: {self._last_error!r}"
            ) from self._last_error

    async def _number(self) -> None:
        while True:
            await self._to_number.wait()
            self._to_number.clear()
            groups = _by_attempt(self._arrived)
            self._arrived = []
            await asyncio.gather(*map(self._number_group, groups))
            self._to_write.set()

    async def _number_group(self, group: list[PendingSpan]) -> None:
        delay = _FIRST_RETRY_S
        numbers: Sequence[int]
        while True:
            try:
                numbers = await self._sink.reserve_sequence_ids([p.attempt for p in group])
                break
            except SpansRefusedError:
                numbers = range(1, len(group) + 1)  # writing them is refused, too, and reports it
                break
            except Exception as error:
                delay = await self._wait_before_retry(error, delay)
        for pending, number in zip(group, numbers, strict=True):
            pending.sequence = number

    async def _write(self) -> None:
        delay = _FIRST_RETRY_S
        while True:
            await self._to_write.wait()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._flushing.wait(), _WRITE_DELAY_S)
            self._flushing.clear()
            self._to_write.clear()
            ready = [p for p in self._finished if p.sequence]
            for pending in ready:
                if pending.record is None:
                    assert pending.make is not None
                    pending.record = pending.make(pending.sequence)
                    if len(ready) < _BACKLOG:
                        await asyncio.sleep(0)  # let requests go first
            errors = await asyncio.gather(*map(self._write_group, _by_attempt(ready)))
            failures = [error for error in errors if error is not None]
            if failures:
                delay = await self._wait_before_retry(failures[0], delay)
                self._to_write.set()
            else:
                delay = _FIRST_RETRY_S

    async def _write_group(self, group: list[PendingSpan]) -> Exception | None:
        """Add the spans of one attempt. Returns the error if a retry may help."""
        try:
            await self._sink.add_spans([p.record for p in group if p.record is not None])
        except SpansRefusedError as error:
            self._refused[group[0].rollout_id] = error
            _log.error("the store refused %d calls of rollout %s: %s", len(group), group[0].rollout_id, error)
        except Exception as error:
            return error
        for pending in group:
            del self._finished[pending]
            pending.stored.set_result(None)
        return None

    async def _wait_before_retry(self, error: Exception, delay: float) -> float:
        self._last_error = error
        _log.warning("the store failed (%r); trying again in %.2f s", error, delay)
        await asyncio.sleep(delay)
        return min(2 * delay, _LAST_RETRY_S)


def _by_attempt(spans: Sequence[PendingSpan]) -> list[list[PendingSpan]]:
    groups: dict[tuple[str, str], list[PendingSpan]] = defaultdict(list)
    for pending in spans:
        groups[pending.attempt].append(pending)
    return list(groups.values())
