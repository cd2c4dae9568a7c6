"""The trainer's side of rollouts: enqueue a batch, wait until it has ended, collect typed results.

A batch always returns completely and in time. A rollout that has not ended by the deadline is cancelled in the store
and returned as a ``timeout``; a failed one has the type of its failure. What the policy caused is scored
(:mod:`groundwire.train.rollouts.failure_scores`). The others have no reward, and the trainer leaves them out of their
groups.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.types import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    ProxyLLM,
    RolloutConfig,
)

from groundwire.adapters.tracing.proxy import LLMProxy, SpansNotStoredError
from groundwire.train.rollouts.failure_scores import FailureScores
from groundwire.train.rollouts.outcome import add_spans, final_outcome
from groundwire.train.rollouts.runner.request_check import MAIN_LLM, POLICY_RESOURCE
from groundwire.train.store.backends.base import MemoryStore, NotifyAttemptEnd
from groundwire.train.store.errors import StoreFailedError, StoreLostDataError
from groundwire.train.store.rollout import Attempt, Rollout

__all__ = ["RolloutCollector"]

_log = logging.getLogger(__name__)
_CHECKED = 1000
_COLLECT_S = 5.0
"""How long a result may be collected after the deadline."""
_FLUSH_PART = 0.8
"""The part of the time to collect a result in which its calls may be stored; the rest is for reading them."""
_UNFINISHED = ["queuing", "requeuing", "preparing", "running"]


class RolloutCollector:
    """Sends batches of requests through a store and returns their results.

    ``retries`` is how often a failed rollout is tried again, ``scores`` are those of failed ones, ``poll_s`` is
    how often, in seconds, the store is asked which rollouts have ended. Within one process there is no need to poll:
    ``notify_runners`` is called when rollouts have been enqueued, and the store calls :meth:`notify` when an attempt
    has ended.

    After ``attempt_timeout_s`` seconds the store gives up an attempt. ``on_result`` gets each result of :meth:`run`,
    before it is returned.

    For runners in other processes: the resource ``resources_id`` of the store has the current address of the proxy,
    ``settings`` and named ``prompts`` are those of their agents, a runner that is silent for ``unresponsive_s`` seconds
    loses its rollout to another, and if no runner works on any rollout for ``no_runner_s`` seconds, a warning shows
    ``runner_command``.
    """

    def __init__(
        self,
        *,
        store: LightningStore,
        proxy: LLMProxy,
        model: str,
        retries: int = 1,
        scores: FailureScores | None = None,
        attempt_timeout_s: float = 240.0,
        poll_s: float = 0.5,
        notify_runners: Callable[[], None] = lambda: None,
        resources_id: str = "rs-run",
        settings: Mapping[str, Any] | None = None,
        prompts: Mapping[str, str] | None = None,
        on_result: Callable[[Rollout], None] = lambda result: None,
        unresponsive_s: float | None = None,
        runner_command: str = "",
        no_runner_s: float = 10.0,
    ) -> None:
        self._store, self._proxy, self._model, self._notify_runners = store, proxy, model, notify_runners
        self._resources_id, self._settings, self._prompts = resources_id, dict(settings or {}), dict(prompts or {})
        self._on_result = on_result
        self._scores = scores or FailureScores()
        self._config = RolloutConfig(
            timeout_seconds=attempt_timeout_s,
            unresponsive_seconds=unresponsive_s,
            max_attempts=1 + retries,
            retry_condition=["failed", "timeout", "unresponsive"],
        )
        if isinstance(store, NotifyAttemptEnd):
            store.on_attempt_end = self.notify
        self._published, self._publishing, self._newest = False, asyncio.Lock(), ""
        self._poll_s, self._notified, self._notification = poll_s, set[str](), asyncio.Event()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._external = bool(runner_command)
        self._no_runner_warning = _NoRunnerWarning(store, runner_command, no_runner_s) if runner_command else None

    async def run(
        self, requests: Sequence[Rollout], *, deadline_s: float, on_end: Callable[[], None] = lambda: None
    ) -> list[Rollout]:
        """Run the rollouts; returns them, ended, in the same order.

        It takes at most ``deadline_s`` seconds, and a few more to collect the results of rollouts that had not ended.
        """
        results: dict[int, Rollout] = {}
        async for index, result in self.each(requests, deadline_s=deadline_s):
            results[index] = result
            on_end()
        ended = [results[index] for index in range(len(requests))]
        self._scores.settle(ended)
        for result in ended:
            self._on_result(result)
        return ended

    async def each(self, requests: Sequence[Rollout], *, deadline_s: float) -> AsyncIterator[tuple[int, Rollout]]:
        """Run the requests; yields the index and the result of each as it ends, in the time that :meth:`run` gives.
        A failure has no score yet.

        Any number of batches may run at once.
        """
        await self._publish_proxy()
        deadline = time.monotonic() + deadline_s
        enqueued = await self._store.enqueue_many_rollouts([self._enqueue_request(request) for request in requests])
        ids = [rollout.rollout_id for rollout in enqueued]
        for request, rollout_id in zip(requests, ids, strict=True):
            request.rollout_id = rollout_id
        self._newest = ids[-1] if ids else self._newest
        ends = [self._watch(rollout_id) for rollout_id in ids]
        await self._publish_if_lost()
        self._notify_runners()

        async def result(index: int) -> tuple[int, Rollout]:
            try:
                await asyncio.wait_for(ends[index], deadline - time.monotonic())
                ended = True
            except asyncio.TimeoutError:
                ended = False
            left_s = max(deadline - time.monotonic(), _COLLECT_S)
            await self._collect(requests[index], ended=ended, timeout_s=left_s)
            return index, requests[index]

        tasks = [asyncio.ensure_future(result(index)) for index in range(len(requests))]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for rollout_id in ids:
                self._waiting.pop(rollout_id, None)

    def notify(self, rollout_id: str) -> None:
        """An attempt of the rollout has ended: ask the store about it now instead of at the next poll."""
        self._proxy.attempt_ended(rollout_id)
        self._notified.add(rollout_id)
        self._notification.set()

    def _enqueue_request(self, request: Rollout) -> EnqueueRolloutRequest:
        return EnqueueRolloutRequest(
            input=dict(request.task),
            mode=request.mode,
            resources_id=self._resources_id,
            config=self._config,
            metadata={
                "group": request.group,
                "sampling": dict(request.sampling),
                "settings": self._settings,
                "prompts": self._prompts if request.prompts is None else dict(request.prompts),
            },
        )

    async def _publish_proxy(self) -> None:
        """Store the proxy's address for all runners; cancel the rollouts that an earlier process of this run left."""
        async with self._publishing:  # or a batch would cancel the rollouts of one that began at the same moment
            if not self._published or await self._lost_between_batches():
                await self._publish()
                self._published = True

    async def _publish(self) -> None:
        policy = ProxyLLM(endpoint=f"http://{self._proxy.host}:{self._proxy.port}/v1", model=self._model)
        await self._store.update_resources(self._resources_id, {POLICY_RESOURCE: policy, MAIN_LLM: policy})
        for rollout in await self._store.query_rollouts(status_in=_UNFINISHED):
            if rollout.resources_id == self._resources_id and rollout.rollout_id not in self._waiting:
                await self._store.update_rollout(rollout.rollout_id, status="cancelled")

    async def _lost_between_batches(self) -> bool:
        """Whether a store in another process has come back without the run's newest rollout, which has ended."""
        if not self._external or not self._newest or await self._store.get_rollout_by_id(self._newest):
            return False
        _log.warning("the store does not have the run's last rollouts any more; the run goes on: no result is lost")
        return True

    async def _publish_if_lost(self) -> None:
        """Publish the proxy again if the store has lost it since :meth:`_publish_proxy`."""
        if self._external and await self._store.get_resources_by_id(self._resources_id) is None:
            async with self._publishing:
                await self._publish()

    def _watch(self, rollout_id: str) -> asyncio.Future[None]:
        """A future that is done when the rollout has ended."""
        end = self._waiting[rollout_id] = asyncio.get_running_loop().create_future()
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch_ends(), name="rollout-ends")
            if self._no_runner_warning is not None:
                self._no_runner_warning.reset()
        return end

    async def _watch_ends(self) -> None:
        """Ask the store which rollouts have ended, while any batch is running.

        The store is never asked to wait: its ``wait_for_rollouts`` would hold a thread of the loop's executor for each
        rollout, and agents need those threads.
        """
        while self._waiting:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._notification.wait(), self._poll_s)
            self._notification.clear()
            candidates = self._waiting.keys() & self._notified or self._waiting.keys()
            self._notified.clear()
            try:
                ended = await self._store.wait_for_rollouts(rollout_ids=list(candidates), timeout=0)
                if self._external and not ended:
                    await self._check_known(list(self._waiting)[-_CHECKED:])
                if self._no_runner_warning is not None:
                    await self._no_runner_warning.check(self._waiting, any_ended=bool(ended))
            except Exception as error:
                for end in self._waiting.values():
                    if not end.done():
                        end.set_exception(error)
                return
            for rollout in ended:
                end_of_rollout = self._waiting.pop(rollout.rollout_id, None)
                if end_of_rollout is not None and not end_of_rollout.done():
                    end_of_rollout.set_result(None)

    async def _check_known(self, rollout_ids: Sequence[str]) -> None:
        """Raises :class:`StoreLostDataError` if the store does not know all these rollouts of the run."""
        known = await self._store.query_rollouts(rollout_id_in=rollout_ids, limit=1)
        if isinstance(known, PaginatedResult) and (lost := len(rollout_ids) - known.total):
            raise StoreLostDataError(
                f"the store does not know {lost} of the {len(rollout_ids)} newest rollouts any more: it was started "
                "again empty, from an older copy, or with --memory; start it with its own --path FILE, then continue "
                "the run with --resume RUN_DIR"
            )

    async def _collect(self, rollout: Rollout, *, ended: bool, timeout_s: float) -> None:
        """Read how a rollout ended, within ``timeout_s`` seconds; one that has not ``ended`` is cancelled."""
        rollout_id, not_stored = rollout.rollout_id, ""

        async def read() -> None:
            nonlocal not_stored
            if not ended:
                if self._external:
                    await self._check_known([rollout_id])
                await self._store.update_rollout(rollout_id, status="cancelled")
            self._proxy.attempt_ended(rollout_id)
            try:
                await self._proxy.flush(rollout_id, timeout_s=timeout_s * _FLUSH_PART)
            except SpansNotStoredError as error:
                not_stored = str(error)
            stored = await self._store.get_rollout_by_id(rollout_id)
            if stored is not None:
                rollout.status, rollout.started, rollout.ended = stored.status, stored.start_time, stored.end_time
            if isinstance(stored, AttemptedRollout):
                rollout.attempts = [Attempt(number=stored.attempt.sequence_id, started=stored.attempt.start_time)]
                spans = await self._store.query_spans(rollout_id, stored.attempt.attempt_id)
                not_stored = not_stored or add_spans(rollout, spans)
            if isinstance(self._store, MemoryStore):  # its memory would grow with every rollout of the run
                await self._store.drop_spans(rollout_id)

        try:
            await asyncio.wait_for(read(), timeout_s)
        except asyncio.TimeoutError:
            not_stored = not_stored or "the store did not answer by the step's deadline"
            with suppress(SpansNotStoredError):
                await self._proxy.flush(rollout_id, timeout_s=0)  # nobody needs its calls any more
        except StoreFailedError as error:  # this rollout's fault: the store answers others
            not_stored = not_stored or str(error)
        rollout.started = rollout.started or time.time()
        rollout.ended = rollout.ended or time.time()
        rollout.outcome = final_outcome(rollout, not_stored=not_stored)


class _NoRunnerWarning:
    """Warns if rollouts wait and no runner takes them: a trainer whose runners are not started would seem to hang.

    If no rollout has ended for ``after_s`` seconds, the store is asked whether any is running. The warning is logged
    once, until a rollout ends.
    """

    def __init__(self, store: LightningStore, runner_command: str, after_s: float) -> None:
        self._store, self._runner_command, self._after_s = store, runner_command, after_s
        self.reset()

    def reset(self) -> None:
        self._since, self._warned = time.monotonic(), False

    async def check(self, waiting: Collection[str], *, any_ended: bool) -> None:
        if any_ended:
            self.reset()
        if self._warned or time.monotonic() - self._since < self._after_s:
            return
        self._since = time.monotonic()
        running = ["preparing", "running"]
        if not await self._store.query_rollouts(status_in=running, rollout_id_in=list(waiting), limit=1):
            self._warned = True
            _log.warning(
                "%d rollouts wait, and no runner takes them: start one with: %s", len(waiting), self._runner_command
            )
