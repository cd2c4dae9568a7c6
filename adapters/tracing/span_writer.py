"""Calls reach the store behind the agent's back: a reply never waits for the store, and the store never loses a call.

Two tasks share the work. One takes sequence numbers in order of arrival, while the policy is still sampling, so that a
reward emitted after a reply always comes after its call. The other turns finished calls into spans and adds them. Each
rollout is written by itself, so a rollout that the store refuses holds up no other; what fails is tried again, with the
same span ids, and a store that already has them skips them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from groundwire.adapters.tracing.calls import to_span
from groundwire.adapters.tracing.openai_wire import HttpExchange, read_exchange
from groundwire.tools.errors import UserError

__all__ = ["PendingSpan", "SpanStore", "SpanWriter", "SpansNotStoredError"]

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0

_PAUSE_S = 0.005
"""How long finished calls wait for the store where nobody waits for them: an agent's next call goes first."""
_BEHIND = 256
"""Finished calls from which on the store goes first: more arrive than are written, and they wait in memory."""


class SpanStore(Protocol):
    """The part of a Lightning store that tracing needs."""

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One number for each pair, rising within a rollout."""
        ...

    async def add_many_spans(self, spans: Sequence[Any]) -> Sequence[Any]:
        """Persist spans; spans that are already there are skipped."""
        ...


class SpansNotStoredError(UserError):
    """The store refused the spans of some calls, or did not accept them before the proxy stopped."""

    exit_code = 1


@dataclass(slots=True, eq=False)
class PendingSpan:
    """A call's place in the queue, from its arrival until it is in the store."""

    rollout_id: str
    attempt_id: str
    sequence: int = 0
    make: Callable[[int], Any] | None = None
    """Its span, made of its sequence number; None as long as it is under way."""
    span: Any = None
    stored: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def key(self) -> tuple[str, str]:
        """Rollout and attempt."""
        return self.rollout_id, self.attempt_id


class SpanWriter:
    """Numbers calls as they arrive and writes them once they are finished. Lives on one event loop."""

    def __init__(self, store: SpanStore) -> None:
        self._store = store
        self._arrived: list[PendingSpan] = []
        self._finished: dict[PendingSpan, None] = {}
        self._to_number, self._to_write, self._hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._refused: dict[str, Exception] = {}
        self._last_error: Exception | None = None
        self._tasks = [asyncio.create_task(self._number()), asyncio.create_task(self._write())]

    def reserve(self, rollout_id: str, attempt_id: str) -> PendingSpan:
        """Take a call's place in the order, at its arrival."""
        ticket = PendingSpan(rollout_id, attempt_id)
        self._arrived.append(ticket)
        self._to_number.set()
        return ticket

    def finish(self, ticket: PendingSpan, exchange: HttpExchange) -> None:
        """Queue a call for the store. The first time counts: a stream is finished before its last bytes are sent."""
        self._finish(ticket, lambda sequence: to_span(read_exchange(exchange, sequence=sequence)))

    def add(self, rollout_id: str, attempt_id: str, make: Callable[[int], Any]) -> None:
        """Queue a span that is no call's, in its place among them; ``make`` gives it its sequence number."""
        self._finish(self.reserve(rollout_id, attempt_id), make)

    def _finish(self, ticket: PendingSpan, make: Callable[[int], Any]) -> None:
        if ticket.make is None:
            ticket.make = make
            self._finished[ticket] = None
            self._to_write.set()

    async def flush(self, rollout_id: str | None = None) -> None:
        """Wait until every finished call (of one rollout) is in the store.

        Raises :class:`SpansNotStoredError` where the store refused one for good.
        """
        waiting = [t.stored for t in self._finished if rollout_id is None or t.rollout_id == rollout_id]
        if waiting:
            self._hurry.set()
            await asyncio.gather(*map(asyncio.shield, waiting))
        for refused, error in self._refused.items():
            if rollout_id in (None, refused):
                raise SpansNotStoredError(f"the store refused a call of rollout {refused}: {error}") from error

    async def close(self, *, timeout_s: float) -> None:
        """Write what is left, then end. Raises :class:`SpansNotStoredError` with the count where time runs out."""
        if self._finished:
            self._hurry.set()
            await asyncio.wait([t.stored for t in self._finished], timeout=timeout_s)
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
            groups = _by_rollout(self._arrived)
            self._arrived = []
            await asyncio.gather(*map(self._number_group, groups))
            self._to_write.set()

    async def _number_group(self, tickets: list[PendingSpan]) -> None:
        delay = _FIRST_RETRY_S
        numbers: Sequence[int]
        while True:
            try:
                numbers = await self._store.get_many_span_sequence_ids([t.key for t in tickets])
            except Exception as error:  # whatever it is, the calls are kept and asked for again
                if _is_refusal(error):  # any number will do: the write is refused in turn, and says so
                    numbers = range(1, len(tickets) + 1)
                    break
                delay = await self._back_off(error, delay)
            else:
                break
        for ticket, number in zip(tickets, numbers, strict=True):
            ticket.sequence = number

    async def _write(self) -> None:
        delay = _FIRST_RETRY_S
        while True:
            await self._to_write.wait()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), _PAUSE_S)
            self._hurry.clear()
            self._to_write.clear()
            ready = [t for t in self._finished if t.sequence]
            for ticket in ready:
                if ticket.span is None:
                    assert ticket.make is not None
                    ticket.span = ticket.make(ticket.sequence)
                    if len(ready) < _BEHIND:
                        await asyncio.sleep(0)  # requests go first
            errors = await asyncio.gather(*map(self._write_group, _by_rollout(ready)))
            failures = [error for error in errors if error is not None]
            if failures:
                delay = await self._back_off(failures[0], delay)
                self._to_write.set()
            else:
                delay = _FIRST_RETRY_S

    async def _write_group(self, tickets: list[PendingSpan]) -> Exception | None:
        """Add one rollout's spans. Returns the error where it is worth another try."""
        try:
            await self._store.add_many_spans([t.span for t in tickets])
        except Exception as error:  # the store is somebody else's code, and a call must outlive it
            if not _is_refusal(error):
                return error
            self._refused[tickets[0].rollout_id] = error
            _log.error("the store refused %d calls of rollout %s: %s", len(tickets), tickets[0].rollout_id, error)
        for ticket in tickets:
            del self._finished[ticket]
            ticket.stored.set_result(None)
        return None

    async def _back_off(self, error: Exception, delay: float) -> float:
        self._last_error = error
        _log.warning("the store failed (%r); trying again in %.2f s", error, delay)
        await asyncio.sleep(delay)
        return min(2 * delay, _LAST_RETRY_S)


def _is_refusal(error: Exception) -> bool:
    """A plain ValueError is the store's word for "no such rollout or attempt": asking again changes nothing."""
    return type(error) is ValueError


def _by_rollout(tickets: Sequence[PendingSpan]) -> list[list[PendingSpan]]:
    groups: dict[tuple[str, str], list[PendingSpan]] = defaultdict(list)
    for ticket in tickets:
        groups[ticket.key].append(ticket)
    return list(groups.values())
