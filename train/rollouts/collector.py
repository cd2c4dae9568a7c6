"""The trainer's side of rollouts: enqueue a batch, wait until it has ended, read how.

A batch always returns completely and in time. A rollout that has not ended by the deadline is cancelled in the store
and returned as a ``timeout``; a failed one has the type of its failure. What the policy caused is scored
(:mod:`groundwire.train.rollouts.outcome`). The others have no reward, and the trainer leaves them out of their
groups.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from groundwire.adapters.tracing.call_writer import CallsNotStoredError
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.spans import TraceLimit
from groundwire.tools import clock
from groundwire.train.rollouts.errors import RunnersEndedError
from groundwire.train.rollouts.outcome import FailureScores, final_outcome, groups_of
from groundwire.train.rollouts.runner.request_check import MAIN_LLM, POLICY_RESOURCE
from groundwire.train.rollouts.silent_runners import SilentRunners
from groundwire.train.store.base import RolloutStore
from groundwire.train.store.errors import StoreFailedError, StoreLostDataError
from groundwire.train.store.rollout import ProxyLLM, Rollout

_log = logging.getLogger(__name__)
_CHECKED = 1000
_COLLECT_S = 5.0
"""How long a result may be collected after the deadline."""
_FLUSH_PART = 0.8
"""The part of the time to collect a result in which its calls may be stored; the rest is for reading them."""


class RolloutCollector:
    """Sends batches of rollouts through a store and reads how each has ended.

    ``retries`` is how often a failed rollout is tried again, ``scores`` are those of failed ones, ``poll_s`` is
    how often, in seconds, the store is asked which rollouts have ended. Within one process there is no need to poll:
    ``notify_runners`` is called when rollouts have been enqueued, and the store calls :meth:`notify` when an attempt
    has ended. ``runner_failure`` gives a message once no runner of the run is left.

    After ``attempt_timeout_s`` seconds, or beyond ``trace_limit``, the store gives up an attempt. ``on_result`` gets
    each rollout of :meth:`run`, before it is returned. ``compare`` completes the rewards of a group that has ended.

    For runners in other processes: the resource ``resources_id`` of the store has the current address of the proxy,
    ``settings`` and named ``prompts`` are those of their agents, a runner that is silent for ``unresponsive_s`` seconds
    loses its rollout to another, ``silent_runners`` notices it, and if no runner works on any rollout for
    ``no_runner_s`` seconds, a warning shows ``runner_command``.
    """

    def __init__(
        self,
        *,
        store: RolloutStore,
        proxy: LLMProxy,
        model: str,
        retries: int = 1,
        scores: FailureScores | None = None,
        attempt_timeout_s: float = 240.0,
        trace_limit: TraceLimit | None = None,
        poll_s: float = 0.5,
        notify_runners: Callable[[], None] = lambda: None,
        runner_failure: Callable[[], str] = lambda: "",
        resources_id: str = "rs-run",
        settings: Mapping[str, Any] | None = None,
        prompts: Mapping[str, str] | None = None,
        on_result: Callable[[Rollout], None] = lambda rollout: None,
        compare: Callable[[Sequence[Rollout]], Awaitable[None]] | None = None,
        unresponsive_s: float | None = None,
        silent_runners: SilentRunners | None = None,
        runner_command: str = "",
        no_runner_s: float = 10.0,
    ) -> None:
        self._store, self._proxy, self._model = store, proxy, model
        self._scores = scores or FailureScores()
        self._notify_runners, self._runner_failure, self._on_result = notify_runners, runner_failure, on_result
        self._compare = compare
        self._resources_id, self._settings, self._prompts = resources_id, dict(settings or {}), dict(prompts or {})
        self._max_attempts, self._timeout_s, self._unresponsive_s = 1 + retries, attempt_timeout_s, unresponsive_s
        self._trace_limit = trace_limit or TraceLimit()
        store.on_attempt_end = self.notify
        self._is_published, self._publishing = False, asyncio.Lock()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """By rollout; each is done when the rollout has ended."""
        self._watcher: asyncio.Task[None] | None = None
        self._poll_s = poll_s
        self._notified, self._notification = set[str](), asyncio.Event()
        self._external, self._silent_runners = bool(runner_command), silent_runners
        self._runner_command, self._no_runner_s = runner_command, no_runner_s
        self._last_end, self._warned = time.monotonic(), False

    async def run(
        self,
        rollouts: Sequence[Rollout],
        *,
        deadline_s: float,
        on_end: Callable[[], None] = lambda: None,
        show: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Run the rollouts; returns them, ended and with the scores of those that failed.

        ``show`` gets each as it ends, in a thread.

        It takes at most ``deadline_s`` seconds, and a few more to collect the results of rollouts that had not ended.
        """
        async for _, rollout in self.each(rollouts, deadline_s=deadline_s):
            on_end()
            if show is not None:
                self._scores.settle([rollout])
                await asyncio.to_thread(show, rollout)
        self._scores.settle(rollouts)
        for rollout in rollouts:
            self._on_result(rollout)
        return list(rollouts)

    async def each(self, rollouts: Sequence[Rollout], *, deadline_s: float) -> AsyncIterator[tuple[int, Rollout]]:
        """Run the rollouts; yields each with its index as it ends, in the time that :meth:`run` gives, or as its group
        has been compared. A failure has no score yet.

        Any number of batches may run at once.
        """
        await self._publish_proxy()
        deadline = time.monotonic() + deadline_s
        for rollout in rollouts:
            rollout.resources_id, rollout.settings = self._resources_id, self._settings
            rollout.prompts = self._prompts if rollout.prompts is None else rollout.prompts
            rollout.max_attempts, rollout.trace_limit = self._max_attempts, self._trace_limit
            rollout.timeout_s, rollout.unresponsive_s = self._timeout_s, self._unresponsive_s
        await self._store.enqueue(rollouts)
        ends = [self._watch(rollout.rollout_id) for rollout in rollouts]
        self._notify_runners()

        async def result(index: int) -> None:
            try:
                await asyncio.wait_for(ends[index], deadline - time.monotonic())
                ended = True
            except asyncio.TimeoutError:
                ended = False
            left_s = max(deadline - time.monotonic(), _COLLECT_S)
            await self._collect(rollouts[index], ended=ended, timeout_s=left_s)

        async def results(group: Sequence[int]) -> Sequence[int]:
            await asyncio.gather(*map(result, group))
            if self._compare is not None:
                await self._compare([rollouts[index] for index in group])
            return group

        groups = groups_of(rollouts) if self._compare is not None else [[index] for index in range(len(rollouts))]
        tasks = [asyncio.ensure_future(results(group)) for group in groups]
        try:
            for task in asyncio.as_completed(tasks):
                for index in await task:
                    yield index, rollouts[index]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for rollout in rollouts:
                self._waiting.pop(rollout.rollout_id, None)

    def notify(self, rollout_id: str) -> None:
        """An attempt of the rollout has ended: ask the store about it now instead of at the next poll."""
        self._proxy.attempt_ended(rollout_id)
        self._notified.add(rollout_id)
        self._notification.set()

    async def _publish_proxy(self) -> None:
        """Store the proxy's address for all runners; cancel the rollouts that an earlier process of this run left.

        A store in another process gets it with each batch: it may have come back empty since the last one.
        """
        async with self._publishing:  # or a batch would cancel the rollouts of one that began at the same moment
            if self._is_published and not self._external:
                return
            policy = ProxyLLM(endpoint=f"http://{self._proxy.host}:{self._proxy.port}/v1", model=self._model)
            await self._store.put_resources(self._resources_id, {POLICY_RESOURCE: policy, MAIN_LLM: policy})
            if not self._is_published:
                for rollout_id in await self._store.unfinished(self._resources_id):
                    await self._store.cancel(rollout_id)
            self._is_published = True

    def _watch(self, rollout_id: str) -> asyncio.Future[None]:
        """A future that is done when the rollout has ended."""
        end = self._waiting[rollout_id] = asyncio.get_running_loop().create_future()
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch_ends(), name="rollout-ends")
            self._last_end, self._warned = time.monotonic(), False
        return end

    async def _watch_ends(self) -> None:
        """Ask the store which rollouts have ended, while any batch is running. An error is that of all batches."""
        while self._waiting:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._notification.wait(), self._poll_s)
            self._notification.clear()
            candidates = self._waiting.keys() & self._notified or self._waiting.keys()
            self._notified.clear()
            try:
                if message := self._runner_failure():
                    raise RunnersEndedError(message)
                ended = await self._store.ended(list(candidates))
                if ended:
                    self._last_end, self._warned = time.monotonic(), False
                elif self._external:
                    await self._check_known(list(self._waiting)[-_CHECKED:])
                    await self._warn_of_no_runner()
                if self._silent_runners is not None:
                    await self._silent_runners.look()
            except Exception as error:
                for end in self._waiting.values():
                    if not end.done():
                        end.set_exception(error)
                return
            for rollout_id in ended:
                end_of_rollout = self._waiting.pop(rollout_id, None)
                if end_of_rollout is not None and not end_of_rollout.done():
                    end_of_rollout.set_result(None)

    async def _warn_of_no_runner(self) -> None:
        """Warn if rollouts wait and no runner takes them: a trainer whose runners are not started would seem to hang.

        If no rollout has ended for ``no_runner_s`` seconds, the store is asked whether any is running. The warning is
        logged once, until a rollout ends.
        """
        if self._warned or time.monotonic() - self._last_end < self._no_runner_s:
            return
        self._last_end = time.monotonic()
        if not await self._store.count(list(self._waiting), ("preparing", "running")):
            self._warned = True
            message = "%d rollouts wait, and no runner takes them: start one with: %s"
            _log.warning(message, len(self._waiting), self._runner_command)

    async def _check_known(self, rollout_ids: Sequence[str]) -> None:
        """Raises :class:`StoreLostDataError` if the store does not know all these rollouts of the run."""
        if lost := len(rollout_ids) - await self._store.count(rollout_ids):
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
                await self._store.cancel(rollout_id)
            self._proxy.attempt_ended(rollout_id)
            try:
                await self._proxy.flush(rollout_id, timeout_s=timeout_s * _FLUSH_PART)
            except CallsNotStoredError as error:
                not_stored = str(error)
            stored = await self._store.get(rollout_id)
            if stored is not None and stored is not rollout:  # a store in this process has the very object
                rollout.status, rollout.started, rollout.ended = stored.status, stored.started, stored.ended
                rollout.attempts, rollout.outcome = stored.attempts, stored.outcome
                rollout.calls, rollout.annotations = stored.calls, stored.annotations
            await self._store.forget(rollout_id)  # or its memory would grow with every rollout of the run

        try:
            await asyncio.wait_for(read(), timeout_s)
        except asyncio.TimeoutError:
            not_stored = not_stored or "the store did not answer by the step's deadline"
            with suppress(CallsNotStoredError):
                await self._proxy.flush(rollout_id, timeout_s=0)  # nobody needs its calls any more
        except StoreFailedError as error:  # this rollout's fault: the store answers others
            not_stored = not_stored or str(error)
        rollout.started = rollout.started or clock.now()
        rollout.ended = rollout.ended or clock.now()
        rollout.outcome = final_outcome(rollout, not_stored=not_stored)
