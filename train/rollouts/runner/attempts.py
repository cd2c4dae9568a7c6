"""The attempts that run in this process: how each ends, and the spans that its runner and its agent report."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from groundwire.adapters import Answer
from groundwire.adapters.tracing.emitted_spans import Emissions
from groundwire.adapters.tracing.semconv import (
    ABOUT_ANSWER,
    ANNOTATION_SPAN,
    ANSWER_SPAN,
    FAILURE_SPAN,
    LEAST_REWARD,
    QUERY_SCORES,
    REWARD_PREFIX,
)
from groundwire.adapters.tracing.span_writer import SpansNotStoredError, SpanWriter
from groundwire.adapters.tracing.spans import SpanRecord, SpanStore
from groundwire.tools.secrets import mask_secrets
from groundwire.train.store.wire import AttemptedRollout

__all__ = ["AttemptReport", "OpenAttempts", "PoolStoppedError", "answer_span", "failure_span", "reward_span"]

_CLOSE_S = 5.0
_FLUSH_S = 120.0
_MAX_MESSAGE = 2000


class PoolStoppedError(Exception):
    """The runner pool stops; another runner gets the rollout."""


@dataclass(frozen=True)
class AttemptReport:
    """The end of an attempt: the spans to store, and whether the store shall try the rollout again."""

    spans: Sequence[ReportedSpan]
    failed: bool = False

    async def store(self, store: SpanStore, rollout: AttemptedRollout) -> None:
        """Store the spans. Raises :class:`groundwire.adapters.tracing.spans.SpansRefusedError`."""
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        numbers = await store.reserve_sequence_ids([ids] * len(self.spans))
        await store.add_spans(
            [
                SpanRecord(**vars(span), rollout_id=ids[0], attempt_id=ids[1], sequence_id=number)
                for span, number in zip(self.spans, numbers, strict=True)
            ]
        )


@dataclass(frozen=True)
class ReportedSpan:
    """A span without its place among the spans of its attempt. Times are seconds since the epoch."""

    name: str
    attributes: Mapping[str, Any]
    start_time: float
    end_time: float = field(default_factory=time.time)


def answer_span(answer: Answer, started: float, query_scores: Sequence[float] = ()) -> ReportedSpan:
    """The span of an agent's answer and steps, how it was called and judged, and the rewards of its earlier queries."""
    steps = json.dumps(answer.steps, ensure_ascii=False)
    more = {f"groundwire.{name}": text for name in ABOUT_ANSWER if (text := getattr(answer, name))}
    attributes = {"groundwire.text": answer.text, "groundwire.steps": steps, QUERY_SCORES: json.dumps(query_scores)}
    return ReportedSpan(ANSWER_SPAN, attributes | more, started)


def failure_span(kind: str, message: str, started: float, *, least_reward: float = 0.0) -> ReportedSpan:
    """The span of a failure of the type ``kind``. ``least_reward`` is the least value that the reward declares."""
    text = mask_secrets(message)[:_MAX_MESSAGE]
    attributes = {"groundwire.kind": kind, "groundwire.message": text, LEAST_REWARD: least_reward}
    return ReportedSpan(FAILURE_SPAN, attributes, started)


def reward_span(values: Mapping[str, float], *, least_reward: float = 0.0) -> ReportedSpan:
    """The span of a reward, as Agent Lightning's ``emit_reward`` writes it: named values, the primary one first."""
    attributes: dict[str, Any] = {LEAST_REWARD: least_reward}
    for index, (name, value) in enumerate(values.items()):
        attributes |= {f"{REWARD_PREFIX}{index}.name": name, f"{REWARD_PREFIX}{index}.value": float(value)}
    return ReportedSpan(ANNOTATION_SPAN, attributes, time.time())


class OpenAttempts:
    """The attempts that run on one event loop, and the writer of the spans that their agents emit."""

    def __init__(self, store: SpanStore) -> None:
        self._store, self._stopping = store, False
        self._writer: SpanWriter | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def open(self, rollout: AttemptedRollout) -> AsyncIterator[None]:
        """Encloses the run of an agent. Raises :class:`SpansNotStoredError` if the store refuses an emitted span, and
        :class:`PoolStoppedError` when :meth:`interrupt` is called.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._stopping:
                raise PoolStoppedError
            writer = self._writer = self._writer or SpanWriter(self._store)
            emissions = Emissions(writer, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)
            try:
                with emissions.activate():
                    yield
            except Exception:
                await writer.flush(rollout.rollout_id, timeout_s=_FLUSH_S)
                raise
            await writer.flush(rollout.rollout_id, timeout_s=_FLUSH_S)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            raise PoolStoppedError from None
        finally:
            self._tasks.discard(task)

    def interrupt(self) -> None:
        """Interrupt the agents that are running, and refuse further ones."""
        self._stopping = True
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Write the spans that are left."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with suppress(SpansNotStoredError):  # of attempts that another runner repeats
                await writer.close(timeout_s=_CLOSE_S)
