"""Rollouts as the trainer sees them: enqueue a batch, wait for it, collect typed outcomes.

A batch always comes back whole and in time. What did not end by the deadline is cancelled in the store and comes back
as a ``timeout``; what failed comes back with the type of its failure. Only a rollout with a reward has a number:
leaving the others out of their group is the trainer's business, turning them into a 0 is nobody's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, ProxyLLM, RolloutConfig, Span

from groundwire.adapters.tracing import LLMCall, all_calls_from_spans, reward_from_spans
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.domains import Task
from groundwire.tools.types import AgentStep
from groundwire.train.rollouts.agent import ANSWER_SPAN, FAILURE_SPAN, POLICY_RESOURCE
from groundwire.train.rollouts.no_runner_warning import NoRunnerWarning
from groundwire.train.store.lightning_calls import with_call_spans

__all__ = ["RolloutCollector", "RolloutRequest", "RolloutResult"]

Mode = Literal["train", "val"]


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """One rollout to be run. Jobs with one ``group`` are samples of one task and are compared with each other."""

    task: Task
    group: str
    mode: Mode
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """What became of a rollout: a reward, or the type of its failure."""

    job: RolloutRequest
    rollout_id: str
    status: str
    """``succeeded``, or a failure's type: agent, tool, endpoint, prompt_too_long, timeout, reward, judge_abstained,
    no_result."""
    reward: float | None
    reward_components: Mapping[str, float]
    message: str
    answer: str
    steps: Sequence[AgentStep]
    calls: Sequence[LLMCall]
    attempts: int
    seconds: float
    untrainable: Sequence[LLMCall] = ()
    """Calls that are not in ``calls``: each has a :attr:`LLMCall.untrainable_reason`."""

    @property
    def succeeded(self) -> bool:
        """Whether there is a reward."""
        return self.reward is not None


class RolloutCollector:
    """Sends batches of jobs through a store and brings their outcomes back.

    ``retries`` is how often a failed attempt is given to a runner again; ``poll_s`` is how often the store is asked
    what has ended. Runners in this process need no polling: ``wake`` tells them that the queue has work, and they
    :meth:`nudge`. For those in other processes: ``resources_id`` names what the store tells them of this run (always
    the newest address of the proxy), ``settings`` are how their agents are made, a runner that is silent for
    ``unresponsive_s`` seconds loses its rollout to another, and ``attendance`` says where there is none.
    """

    def __init__(
        self,
        *,
        store: LightningStore,
        proxy: LLMProxy,
        model: str,
        retries: int = 1,
        rollout_timeout_s: float = 120.0,
        poll_s: float = 0.5,
        wake: Callable[[], None] = lambda: None,
        resources_id: str = "rs-run",
        settings: Mapping[str, Any] | None = None,
        unresponsive_s: float | None = None,
        attendance: NoRunnerWarning | None = None,
    ) -> None:
        self._store, self._proxy, self._wake, self._model = store, proxy, wake, model
        self._attendance = attendance
        self._poll_s, self._nudged, self._bell = poll_s, set[str](), asyncio.Event()
        self._watched: dict[str, asyncio.Future[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._config = RolloutConfig(
            timeout_seconds=2 * rollout_timeout_s,
            unresponsive_seconds=unresponsive_s,
            max_attempts=1 + retries,
            retry_condition=["failed", "timeout", "unresponsive"],
        )
        self._resources_id, self._settings = resources_id, dict(settings or {})
        self._announced, self._announcing = False, asyncio.Lock()

    async def _announce(self) -> None:
        """Tell runners, wherever they are, where the model is; cancel what an earlier life of this run left."""
        async with self._announcing:  # batches begin together, and a late one must not cancel what the first enqueued
            if not self._announced:
                await self._announce_once()
                self._announced = True

    async def _announce_once(self) -> None:
        policy = ProxyLLM(endpoint=f"http://{self._proxy.host}:{self._proxy.port}/v1", model=self._model)
        await self._store.update_resources(self._resources_id, {POLICY_RESOURCE: policy})
        unfinished = ["queuing", "requeuing", "preparing", "running"]
        for rollout in await self._store.query_rollouts(status_in=unfinished):
            if rollout.resources_id == self._resources_id:
                await self._store.update_rollout(rollout.rollout_id, status="cancelled")

    async def run(
        self, jobs: Sequence[RolloutRequest], *, deadline_s: float, on_end: Callable[[], None] = lambda: None
    ) -> list[RolloutResult]:
        """Run the jobs and return their outcomes in the same order, at most ``deadline_s`` seconds later."""
        outcomes: dict[int, RolloutResult] = {}
        async for place, outcome in self.each(jobs, deadline_s=deadline_s):
            outcomes[place] = outcome
            on_end()
        return [outcomes[place] for place in range(len(jobs))]

    async def each(
        self, jobs: Sequence[RolloutRequest], *, deadline_s: float
    ) -> AsyncIterator[tuple[int, RolloutResult]]:
        """Run the jobs; yields each one's place and outcome as it ends, all at most ``deadline_s`` seconds later.

        Any number of batches may be under way at once.
        """
        await self._announce()
        requests = [
            EnqueueRolloutRequest(
                input=dict(job.task),
                mode=job.mode,
                resources_id=self._resources_id,
                config=self._config,
                metadata={"group": job.group, "sampling": dict(job.sampling), "settings": self._settings},
            )
            for job in jobs
        ]
        deadline = time.monotonic() + deadline_s
        ids = [rollout.rollout_id for rollout in await self._store.enqueue_many_rollouts(requests)]
        ends = [self._watch(rollout_id) for rollout_id in ids]
        self._wake()

        async def finished(place: int) -> tuple[int, RolloutResult]:
            await self._until(ids[place], ends[place], deadline)
            await self._proxy.flush(ids[place])
            return place, await self._collect(jobs[place], ids[place])

        work = [asyncio.ensure_future(finished(place)) for place in range(len(jobs))]
        try:
            for ended in asyncio.as_completed(work):
                yield await ended
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            for rollout_id in ids:
                self._watched.pop(rollout_id, None)

    def nudge(self, rollout_id: str) -> None:
        """Look at this rollout now rather than at the next poll: an attempt of it ended in this process."""
        self._nudged.add(rollout_id)
        self._bell.set()

    async def _until(self, rollout_id: str, end: asyncio.Future[None], deadline: float) -> None:
        """Wait for a rollout to end; one that has not by the deadline is cancelled in the store."""
        done, _ = await asyncio.wait([end], timeout=max(0.0, deadline - time.monotonic()))
        if done:
            end.result()  # what is wrong with the store is raised here
            return
        self._watched.pop(rollout_id, None)
        await self._store.update_rollout(rollout_id, status="cancelled")

    def _watch(self, rollout_id: str) -> asyncio.Future[None]:
        """A future that is done when the rollout is, whichever batch it belongs to."""
        end = self._watched[rollout_id] = asyncio.get_running_loop().create_future()
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._look(), name="rollout-ends")
            if self._attendance is not None:
                self._attendance.reset()
        return end

    async def _look(self) -> None:
        """Ask the store which rollouts have ended, as long as somebody waits for one.

        The store's own ``wait_for_rollouts`` holds a thread of the loop's executor for each rollout that it waits for,
        and agents need those threads to make progress. So it is only asked what has ended, never to wait.
        """
        while self._watched:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._bell.wait(), self._poll_s)
            self._bell.clear()
            asked = self._watched.keys() & self._nudged or self._watched.keys()
            self._nudged.clear()
            try:
                ended = await self._store.wait_for_rollouts(rollout_ids=list(asked), timeout=0)
                if self._attendance is not None:
                    await self._attendance.look(self._watched, ended=bool(ended))
            except Exception as error:
                for end in self._watched.values():
                    if not end.done():
                        end.set_exception(error)
                return
            for rollout in ended:
                waiting = self._watched.pop(rollout.rollout_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)

    async def _collect(self, job: RolloutRequest, rollout_id: str) -> RolloutResult:
        rollout = await self._store.get_rollout_by_id(rollout_id)
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        spans: Sequence[Span] = []
        if attempt is not None:
            spans = list(await self._store.query_spans(rollout_id, attempt.attempt_id))
        calls = all_calls_from_spans(with_call_spans(spans))
        answer = _last(spans, ANSWER_SPAN)
        failure = _last(spans, FAILURE_SPAN)
        reward, components = _reward(spans)
        status, message = "succeeded", ""
        if reward is None or rollout is None or rollout.status != "succeeded":
            reward = None
            if failure is not None:
                status = str(failure.attributes["groundwire.kind"])
                message = str(failure.attributes["groundwire.message"])
            elif rollout is not None and rollout.status == "cancelled":
                status, message = "timeout", "not finished by the step's deadline"
            else:
                status, message = "no_result", "the runner reported neither a reward nor a failure"
        started = rollout.start_time if rollout else time.time()
        ended = (rollout.end_time if rollout else None) or time.time()
        return RolloutResult(
            job=job,
            rollout_id=rollout_id,
            status=status,
            reward=reward,
            reward_components=components,
            message=message,
            answer=str(answer.attributes["groundwire.text"]) if answer else "",
            steps=json.loads(str(answer.attributes["groundwire.steps"])) if answer else [],
            calls=[call for call in calls if not call.untrainable_reason],
            attempts=attempt.sequence_id if attempt else 0,
            seconds=ended - started,
            untrainable=[call for call in calls if call.untrainable_reason],
        )


def _last(spans: Sequence[Span], name: str) -> Span | None:
    return next((span for span in reversed(spans) if span.name == name), None)


def _reward(spans: Sequence[Span]) -> tuple[float | None, dict[str, float]]:
    """The rollout's reward and its components."""
    value = reward_from_spans(spans)
    if isinstance(value, dict):
        return value["total"], {name: part for name, part in value.items() if name != "total"}
    return value, {}
