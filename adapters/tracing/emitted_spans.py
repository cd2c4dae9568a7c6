"""Spans that an agent emits while it runs: a reward for the call just made, or any other annotation.

``agentlightning.emit_reward(0.5)`` inside an agent becomes a span of its rollout and belongs to a call before it: the
last one in the context of the emitting task, or of a task that was started there since. So parallel tasks reward their
own calls. A call's id is a header of its request, and the emitted span carries it. Our own and hooked HTTP clients send
it; for an agent with another client the store's numbers decide, and those are right as long as calls are not made in
parallel, and a call is numbered before its reply is complete.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

from groundwire.adapters._types import BackendError, EmittedRewardError, TraceLimitError
from groundwire.adapters.tracing.call_writer import CallWriter
from groundwire.adapters.tracing.spans import CALL_ID, EMITTED, SpanRecord, TraceLimit, read_rewards, span_size

CALL_HEADER = "x-call-id"
"""The header with the id of a request."""
_PLACE = re.compile(r"[0-9a-f]+(?:\.[0-9a-f]+){2}")
_MAX_WAITING, _MAX_WAIT_S = 16, 5.0
"""Spans of an attempt's threads that wait for the event loop, and how long the next one waits for a place: an agent
that emits without end holds up itself, and no other rollout."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    emissions: Emissions
    id: str = ""
    """Empty for the start of the attempt."""
    before: _Call | None = None
    """The last call in the context in which this one was made."""

    def follows(self, call: _Call) -> bool:
        """Whether this is ``call``, or was made in a context in which ``call`` had been made."""
        earlier: _Call | None = self
        while earlier is not None and earlier is not call:
            earlier = earlier.before
        return earlier is call


_last_call: ContextVar[_Call | None] = ContextVar("last_call", default=None)
_thread, _jobs = threading.local(), itertools.count(1)


def as_job(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in a copy of the current context, for another thread, which knows its place among such jobs."""
    context, number = copy_context(), next(_jobs)

    def run(*args: Any, **kwargs: Any) -> Any:
        _thread.job = number
        return context.run(function, *args, **kwargs)

    return run


def place_of(call_id: str) -> tuple[int, ...]:
    """Where an agent made a call: the numbers of the job, the task and the call, which order calls that run at once.

    Requests arrive in another order each time. Empty for the id of another client.
    """
    place, is_ours, _ = call_id.partition("-")
    return tuple(int(number, 16) for number in place.split(".")) if is_ours and _PLACE.fullmatch(place) else ()


def _task_number() -> int:
    """The number of the current task of asyncio, which its default name has, in the order in which tasks were made."""
    with suppress(RuntimeError):
        if (task := asyncio.current_task()) is not None and (name := task.get_name()).startswith("Task-"):
            return int(number) if (number := name.removeprefix("Task-")).isdecimal() else 0
    return 0


class Emissions:
    """The emitted spans of one attempt. Any thread may call its methods.

    ``store`` stores the fields of a :class:`SpanRecord`, without those that say where it belongs (:func:`stored_by`).
    """

    def __init__(self, store: Callable[[Mapping[str, Any]], None], limit: TraceLimit | None = None) -> None:
        self._store, self._limit = store, limit or TraceLimit()
        self._spans = self._size = 0
        self.failure: Future[BackendError] = Future()
        """What the attempt fails of, once it has emitted what it must not."""
        self._calls: list[_Call] = []
        self.ended = False

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this :func:`current_emissions` in this task and in the tasks and threads that it starts."""
        token = _last_call.set(_Call(self))
        try:
            yield
        finally:
            self.ended = True
            _last_call.reset(token)

    def start_call(self) -> str:
        """Note that a call is made in the current context; returns its new id, which begins with its place."""
        place = f"{getattr(_thread, 'job', 0):x}.{_task_number():x}.{len(self._calls):x}"
        call = _Call(self, f"{place}-{uuid.uuid4().hex}", _last_call.get())
        _last_call.set(call)
        self._calls.append(call)
        return call.id

    def write(self, fields: Mapping[str, Any]) -> None:
        """Store a span. The first one that the attempt must not emit fails it, and is the last."""
        if self.failure.done():
            return
        attributes = fields["attributes"]
        self._spans, self._size = self._spans + 1, self._size + span_size(attributes)
        failure: BackendError | None = None
        if problem := self._limit.exceeded_by(self._spans, self._size):
            failure = TraceLimitError(problem)
        try:
            read_rewards(attributes)
        except ValueError as error:
            failure = EmittedRewardError(f"the agent emitted no reward: {error}")
        if failure is not None:
            with suppress(InvalidStateError):  # another thread was first
                self.failure.set_result(failure)
        self._store(fields)

    def add(self, name: str, attributes: Mapping[str, Any], **fields: Any) -> None:
        """Store a span for a call that was made before; ``fields`` are the other ones of a :class:`SpanRecord`."""
        last = _last_call.get()
        call_id = next((call.id for call in reversed(self._calls) if last is not None and call.follows(last)), None)
        marks = {EMITTED: True} if call_id is None else {EMITTED: True, CALL_ID: call_id}
        self.write({"name": name, "attributes": {**attributes, **marks}, **fields})


def stored_by(writer: CallWriter, *, rollout_id: str, attempt_id: str) -> Callable[[Mapping[str, Any]], None]:
    """A function that stores the spans of an attempt with ``writer``, on the present event loop, from any thread."""
    loop, places = asyncio.get_running_loop(), threading.Semaphore(_MAX_WAITING)

    def write(fields: Mapping[str, Any]) -> None:
        def store() -> None:
            writer.finish(
                writer.reserve(rollout_id, attempt_id),
                lambda number: SpanRecord(rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=number, **fields),
            )

        def store_in_turn() -> None:
            places.release()
            store()

        try:
            in_loop = asyncio.get_running_loop() is loop
        except RuntimeError:
            in_loop = False
        if in_loop:
            store()
        else:
            places.acquire(timeout=_MAX_WAIT_S)
            loop.call_soon_threadsafe(store_in_turn)

    return write


def current_emissions() -> Emissions | None:
    """Those of the attempt that the calling task belongs to; None outside of an attempt, and after its end."""
    last = _last_call.get()
    return None if last is None or last.emissions.ended else last.emissions


def call_headers() -> dict[str, str]:
    """The header of an LLM call that the calling task makes now; none outside of an attempt."""
    emissions = current_emissions()
    return {} if emissions is None else {CALL_HEADER: emissions.start_call()}
