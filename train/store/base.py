"""The interface of a store of rollouts, and the life of a rollout: when it is queued, tried, given up and ended."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.adapters.tracing.spans import CallSink, SpanRecord
from groundwire.tools import clock
from groundwire.tools.secrets import masked_values, secret_masker
from groundwire.train.store.rollout import (
    ENDED,
    TRANSITIONS,
    UNFINISHED,
    Attempt,
    AttemptStatus,
    Outcome,
    Rollout,
    RolloutStatus,
)

_log = logging.getLogger(__name__)
T = TypeVar("T", bound=LLMCall | SpanRecord | Outcome)
_QUEUED, _OPEN = ("queuing", "requeuing"), ("preparing", "running")
_TEXTS: Mapping[type, Sequence[str]] = {
    LLMCall: ("agent", "model", "error", "messages_json", "tools_json", "reply_json"),
    SpanRecord: ("name", "attributes", "error"),
    Outcome: ("answer", "steps", "input", "judged_field", "message"),
}


class RolloutStore(CallSink, Protocol):
    """A queue of rollouts, and what is known of each: their calls, which the proxy adds, and the spans of their agents.

    Methods raise ``ValueError`` for an unknown rollout or attempt. A change that comes too late, of an ended attempt or
    rollout, is ignored; late calls are stored.
    """

    on_attempt_end: Callable[[str], None] | None = None
    """Called with the rollout's id when a runner ends an attempt; only a store of the same process calls it."""

    @cached_property
    def _mask(self) -> Callable[[str], str]:
        """Made with the first call: the proxy registers its API key after it is given this store."""
        return secret_masker()

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts to the queue. A store behind HTTP gives each a new ``rollout_id``."""

    async def dequeue(self, limit: int, worker_id: str | None = None) -> Sequence[Rollout]:
        """Take up to ``limit`` rollouts, each with a new attempt as its last."""

    async def get(self, rollout_id: str, *, with_calls: bool = True) -> Rollout | None:
        """A rollout with its last attempt's outcome, calls and annotations; None if the store does not have it."""

    async def ended(self, rollout_ids: Collection[str]) -> Sequence[str]:
        """Which of these have ended, after attempts that are overdue were given up."""

    async def count(self, rollout_ids: Collection[str], statuses: Collection[RolloutStatus] | None = None) -> int:
        """How many of these the store has; with ``statuses``, how many are in one of them."""

    async def unfinished(self, resources_id: str) -> Sequence[str]:
        """The rollouts of a run that have not ended."""

    async def cancel(self, rollout_id: str) -> None:
        """End a rollout that nobody waits for any more."""

    async def heartbeat(self, rollout_id: str, attempt_id: str, at: float) -> bool:
        """Note a sign of life at ``at``, by the store's clock. False if the attempt is not the rollout's open one."""

    async def end_attempt(self, rollout_id: str, attempt_id: str, outcome: Outcome | None, *, failed: bool) -> None:
        """End an attempt. A failed one is tried again while ``max_attempts`` allow it."""

    async def signs_of_life(self) -> Mapping[str, Any]:
        """What the store knows of each runner, by its worker's id: it changes for as long as the runner lives."""
        return {}

    async def put_resources(self, resources_id: str, resources: Mapping[str, Any]) -> None:
        """Store a run's named resources: a :class:`ProxyLLM`, or any JSON object."""

    async def get_resources(self, resources_id: str | None) -> Mapping[str, Any] | None:
        """The resources of a run, or without an id those that were stored last; None if there are none."""

    async def forget(self, rollout_id: str) -> None:
        """Free the memory of a rollout that has been read. A store in a file keeps it."""

    async def sampling_of(self, rollout_id: str, attempt_id: str) -> Mapping[str, Any] | None:
        rollout = await self.get(rollout_id, with_calls=False)
        return None if rollout is None else rollout.open_sampling(attempt_id)


class StateMachine(RolloutStore):
    """The rules of a :class:`RolloutStore`; a subclass keeps the rollouts. For one event loop.

    No method but :meth:`get` waits for anything, so each is one step for all others; the calls of a long rollout are
    read in parts. ``scan_s`` is the shortest time, in seconds, between two searches for overdue attempts.
    """

    def __init__(self, *, scan_s: float) -> None:
        self._scan_s, self._scanned, self._opened = scan_s, 0.0, clock.now()
        self.attempts_ended = 0
        """By runners, in the life of this object."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        with self._transaction():
            for rollout in rollouts:
                rollout.started = clock.now()
                self._insert(rollout)
                self._push(rollout.rollout_id)

    async def dequeue(self, limit: int, worker_id: str | None = None) -> Sequence[Rollout]:
        taken: list[Rollout] = []
        with self._transaction():
            self._give_up_overdue()
            while len(taken) < limit and (rollout_id := self._pop()) is not None:
                rollout = self._find(rollout_id)
                if rollout is not None and rollout.status in _QUEUED:  # else it has ended while it was queued
                    self._start_attempt(rollout, worker_id)
                    taken.append(rollout)
        return taken

    async def get(self, rollout_id: str, *, with_calls: bool = True) -> Rollout | None:
        with self._transaction():
            self._give_up_overdue()
            rollout = self._find(rollout_id)
        return await self._with_calls(rollout) if rollout is not None and with_calls else rollout

    async def ended(self, rollout_ids: Collection[str]) -> Sequence[str]:
        with self._transaction():
            self._give_up_overdue()
            rollouts = map(self._find, rollout_ids)
            return [rollout.rollout_id for rollout in rollouts if rollout is not None and rollout.status in ENDED]

    async def count(self, rollout_ids: Collection[str], statuses: Collection[RolloutStatus] | None = None) -> int:
        rollouts = [rollout for rollout in map(self._find, rollout_ids) if rollout is not None]
        return sum(statuses is None or rollout.status in statuses for rollout in rollouts)

    async def unfinished(self, resources_id: str) -> Sequence[str]:
        rollouts = self._in_status(UNFINISHED)
        return [rollout.rollout_id for rollout in rollouts if rollout.resources_id == resources_id]

    async def cancel(self, rollout_id: str) -> None:
        with self._transaction():
            rollout = self._known(rollout_id)
            self._set_status(rollout, "cancelled")
            self._save(rollout)

    async def heartbeat(self, rollout_id: str, attempt_id: str, at: float) -> bool:
        with self._transaction():
            rollout = self._known(rollout_id)
            attempt = attempt_of(rollout, attempt_id)
            is_open = attempt is rollout.attempts[-1] and rollout.status in _OPEN and attempt.status in _OPEN
            if is_open:
                attempt.heartbeat = min(at, clock.now())
                self._save(rollout)
            return is_open

    async def end_attempt(self, rollout_id: str, attempt_id: str, outcome: Outcome | None, *, failed: bool) -> None:
        with self._transaction():
            rollout = self._known(rollout_id)
            attempt = attempt_of(rollout, attempt_id)
            if outcome is not None and attempt.status not in ENDED:
                self._set_outcome(rollout, attempt, outcome)
            self._end(rollout, attempt, "failed" if failed else "succeeded")
        self._tell_end(rollout_id)

    async def give_up(self, worker_id: str) -> int:
        """Give up the open attempts of a runner that has ended; returns how many rollouts are tried again."""
        with self._transaction():
            taken = [rollout for rollout in self._in_status(_OPEN) if rollout.attempts[-1].worker_id == worker_id]
            for rollout in taken:
                self._end(rollout, rollout.attempts[-1], "unresponsive")
        for rollout in taken:
            self._tell_end(rollout.rollout_id)
        return sum(rollout.status == "requeuing" for rollout in taken)

    def _tell_end(self, rollout_id: str) -> None:
        if self.on_attempt_end is not None:
            self.on_attempt_end(rollout_id)

    def _start_attempt(self, rollout: Rollout, worker_id: str | None) -> Attempt:
        """Also of a rollout that has ended: a new start is deliberate."""
        attempt = Attempt(number=len(rollout.attempts) + 1, started=clock.now(), worker_id=worker_id)
        rollout.attempts.append(attempt)
        rollout.status, rollout.ended, rollout.outcome = "preparing", None, Outcome()
        self._save(rollout)
        return attempt

    def _set_status(self, rollout: Rollout, status: RolloutStatus) -> None:
        if status in TRANSITIONS[rollout.status]:
            rollout.status = status
            if status in ENDED:
                rollout.ended = clock.now()
            if status == "requeuing":
                self._push(rollout.rollout_id)

    def _end(self, rollout: Rollout, attempt: Attempt, status: AttemptStatus) -> None:
        """End an attempt, or give it up; an attempt that is not the last has no effect on its rollout."""
        if attempt.status in ENDED:
            return
        attempt.status, attempt.ended = status, clock.now()
        self.attempts_ended += status in ("succeeded", "failed")
        if attempt is rollout.attempts[-1]:
            again = status in rollout.retry_on and attempt.number < rollout.max_attempts
            self._set_status(rollout, "succeeded" if status == "succeeded" else "requeuing" if again else "failed")
        self._save(rollout)

    def _has_room(self, rollout: Rollout, attempt: Attempt, size: int) -> bool:
        """Count a new call or annotation of an attempt. The first one without room fails the attempt."""
        problem = attempt.refuses(size, rollout.trace_limit)
        if not problem:
            return problem is None
        _log.warning("rollout %.100r: %s", rollout.rollout_id, problem)
        if attempt.status not in ENDED:
            self._set_outcome(rollout, attempt, Outcome(failure="trace_limit", message=problem))
            self._end(rollout, attempt, "failed" if rollout.trace_limit.retry else "succeeded")
            self._tell_end(rollout.rollout_id)
        self._save(rollout)
        return False

    def _note_calls(self, rollout: Rollout, attempt: Attempt) -> None:
        """Calls of an open attempt are a sign of life. A late call changes nothing but their count."""
        if attempt.status in _OPEN:
            attempt.heartbeat, attempt.status = clock.now(), "running"
            if attempt is rollout.attempts[-1]:
                self._set_status(rollout, "running")
        self._save(rollout)

    def _give_up_overdue(self) -> None:
        now = clock.now()
        if now - self._scanned < self._scan_s:
            return
        self._scanned = now
        for rollout in self._in_status(_OPEN):
            attempt = rollout.attempts[-1]
            # While no store ran, nobody could tell it anything, and the system's clock may have been set back.
            began = attempt.started if attempt.started <= now else self._opened
            seen = attempt.started if attempt.heartbeat is None else attempt.heartbeat
            seen = seen if self._opened <= seen <= now else self._opened
            if rollout.timeout_s is not None and now - began > rollout.timeout_s:
                self._end(rollout, attempt, "timeout")
            elif rollout.unresponsive_s is not None and now - seen > rollout.unresponsive_s:
                self._end(rollout, attempt, "unresponsive")

    def _known(self, rollout_id: str) -> Rollout:
        rollout = self._find(rollout_id)
        if rollout is None:
            raise ValueError(f"Rollout {rollout_id} not found")
        return rollout

    def _transaction(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @abstractmethod
    def _find(self, rollout_id: str) -> Rollout | None:
        """The store's own object, which may be changed and then saved."""

    @abstractmethod
    def _in_status(self, statuses: Collection[str]) -> Iterable[Rollout]:
        """All rollouts in one of these statuses, as :meth:`_find` returns them."""

    @abstractmethod
    def _insert(self, rollout: Rollout) -> None: ...

    @abstractmethod
    def _save(self, rollout: Rollout) -> None: ...

    @abstractmethod
    def _push(self, rollout_id: str) -> None:
        """To the end of the queue."""

    @abstractmethod
    def _pop(self) -> str | None:
        """From the front of the queue."""

    @abstractmethod
    async def _with_calls(self, rollout: Rollout) -> Rollout: ...

    @abstractmethod
    def _set_outcome(self, rollout: Rollout, attempt: Attempt, outcome: Outcome) -> None: ...


def attempt_of(rollout: Rollout, attempt_id: str) -> Attempt:
    """An attempt of a rollout. Raises ``ValueError``."""
    for attempt in reversed(rollout.attempts):
        if attempt.attempt_id == attempt_id:
            return attempt
    raise ValueError(f"Attempt {attempt_id} not found for rollout {rollout.rollout_id}")


def without_secrets(item: T, mask: Callable[[str], str]) -> T:
    """``item`` with all texts of agents and models masked, in valid Unicode; ``item`` itself if there is no secret."""
    texts = {name: getattr(item, name) for name in _TEXTS[type(item)]}
    masked = masked_values(texts, mask)
    return item if masked == texts else replace(item, **masked)
