"""Runs rollouts for verl's trainer: each prompt becomes a group of rollouts, and each finished rollout becomes rows.

A group with at least two rewards is ``finished``; failed rollouts are not in it. A group with fewer has nothing to
compare: it has no rows and is a ``failure``, which verl replaces by another prompt. So is a group without a gradient,
as long as the ``sampling_budget`` of its step allows. Retries, time limits and cancellation are the store's
(:mod:`groundwire.train.rollouts.collector`), so every group ends. After many failed groups in a row the trainer gets an
error instead of one new prompt after another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from groundwire import domains
from groundwire.domains import Task
from groundwire.train.algorithms.credit import Credit
from groundwire.train.algorithms.health import step_figures
from groundwire.train.algorithms.task_schedule import TaskSchedule
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.tracking import flat_numbers
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.metrics import compute_accuracy, few_questions
from groundwire.train.evaluation.notes import RolloutNotes, agent_notes, gold_in_prompts
from groundwire.train.evaluation.stop_reasons import FailedSteps, failed_by_policy, lasting_failure, nothing_judged
from groundwire.train.evaluation.validation import validation_name, validation_requests
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.factory import make_reward
from groundwire.train.rollouts.failure_scores import FailureScores
from groundwire.train.rollouts.outcome import requests_of_step
from groundwire.train.rollouts.runtime import MODEL_NAME
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.rows import to_row
from groundwire.train.verl.rows import TrainingRow, training_rows
from groundwire.train.verl.step_metrics import StepMetrics
from groundwire.train.verl.transfer_queue import TransferQueueRows

if TYPE_CHECKING:
    from groundwire.train.rollouts.collector import RolloutCollector
    from groundwire.train.rollouts.runtime import RolloutRuntime
    from groundwire.train.verl.rollout_workers import RolloutWorkers

__all__ = ["Prompt", "RolloutService"]

_log = logging.getLogger(__name__)
_MIN_REWARDS = 2  # per training group: a single reward has nothing to be compared with
_CONSTRAINED = (
    "calls with response_format or a required tool are not trained with verl, which cannot compute the "
    "log-probabilities of constrained replies (--trainer local can)"
)
_MAX_EMPTY_BATCHES = 3  # as many prompts in a row without a usable group end the training


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One of verl's prompts."""

    uid: str
    task: Task
    rollouts: int
    """How many to run."""
    step: int
    """verl's ``global_steps`` when it sent the prompt."""
    partition: str
    """``train`` or ``val``."""


class RolloutService:
    """Runs the rollouts of prompts and puts their rows into ``queue``; :meth:`submit` returns at once.

    ``pad_id`` is the only token in the row of a validation rollout that sampled none but counts as wrong. Without
    ``credit`` verl computes the advantages.
    """

    def __init__(
        self,
        *,
        runtime: RolloutRuntime | RolloutWorkers,
        queue: TransferQueueRows,
        config: RunConfig,
        run: RunDir,
        pad_id: int,
        credit: Credit | None,
        schedule: TaskSchedule | None = None,
    ) -> None:
        self._schedule = schedule
        self._max_replaced = int((config.sampling_budget - 1) * config.tasks_per_step)
        self._drawn = defaultdict[int, Counter[str]](Counter)  # groups of each task, by step
        self._replaced: Counter[int] = Counter()  # groups without a gradient that were replaced, by step
        self.runtime, self._credit = runtime, credit
        self._scores = FailureScores(config.failures, run)
        self._queue, self._config, self._run, self._pad_id = queue, config, run, pad_id
        self._lock = threading.Lock()  # the event loop's thread adds to the next two, the trainer's takes from them
        self._results: dict[str, list[Rollout]] = {"train": [], "val": []}
        self._counts = {partition: Counter(groups_skipped=0) for partition in self._results}
        self._open, self._changed = 0, threading.Event()  # set when a group has failed, or all have ended
        self._steps: dict[str, StepMetrics] = {}
        self._empty_groups, self._last_failure = 0, ""
        self._error: BaseException | None = None
        self._constraint_reported = False
        # Writing 2,000 rollouts takes 0.4 s, and the GPUs can update meanwhile.
        self._writer, self._written = ThreadPoolExecutor(1, thread_name_prefix="write-rollouts"), Future[None]()
        self._written.set_result(None)
        self._agent_checked, self._failed_steps = False, FailedSteps()
        self._rollout_notes = RolloutNotes(partial(_log.warning, "%s"), run=run.path, credit=config.credit)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Enqueue the prompts' rollouts. Raises as :meth:`check` does."""
        self.check()
        # verl's loader says how many tasks a step begins with, and its sampler when one is replaced. Which tasks these
        # are is up to the schedule, the same as the local trainer's.
        if self._schedule is not None and prompts[0].partition == "train":
            prompts = [replace(prompt, task=self._schedule.draw(prompt.step)) for prompt in prompts]
        # A validation that runs as many rollouts as several training steps has the time of those steps.
        steps = sum(prompt.rollouts for prompt in prompts) / (self._config.tasks_per_step * self._config.group_size)
        deadline_s = self._config.step_deadline_s * (max(1.0, steps) if prompts[0].partition == "val" else 1.0)

        groups = list(zip(prompts, self._requests(prompts), strict=True))

        async def run_groups(runs: RolloutCollector | RolloutWorkers) -> None:
            await asyncio.gather(*(self._run_group(runs, *group, deadline_s) for group in groups))

        with self._lock:
            self._open += 1
        self.runtime.submit(run_groups).add_done_callback(self._end)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds. True if a group has failed or all have ended since the last call."""
        changed = self._changed.wait(timeout_s)
        self._changed.clear()
        return changed

    def check(self) -> None:
        """Raise the error of a background task, or :class:`RolloutsFailedError` if no rollout can succeed any more."""
        if self._error is not None:
            raise self._error
        if reason := self.runtime.runner_failure():
            raise RolloutsFailedError(reason)
        if self._empty_groups > _MAX_EMPTY_BATCHES * self._config.tasks_per_step:
            raise RolloutsFailedError(
                f"the last {self._empty_groups} prompts had fewer than {_MIN_REWARDS} rollouts to train on each; "
                f"{self._last_failure}"
            )

    def finish_sampling(self, partition: str, step: int, seconds: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the rollouts that ended since the last call. A thread writes the rollouts to the run directory.

        ``seconds`` is the time since the last call by phase (:data:`groundwire.tools.step_timer.PHASES`). With several
        updates per step (``separate_async``) verl samples several times per step and adds up the metrics with ``total``
        in their names; the line in ``rollouts.jsonl`` is about the whole step so far.
        """
        self.finish_writing()
        with self._lock:
            results, self._results[partition] = self._results[partition], []
            counts, self._counts[partition] = self._counts[partition], Counter(groups_skipped=0)
        if partition == "val":  # as a whole: some groups ended before the least reward was known
            self._scores.settle(results)
        for result in results:
            result.step = step
        rows = list(map(to_row, results))
        part = StepMetrics.of(step, rows, counts, seconds, self._config.agent_match)
        total = self._steps.get(partition)
        continues = total is not None and total.step == step
        if total is None or not continues:
            total = self._steps[partition] = StepMetrics(step)
        total.add(part)
        if rows:
            kind = f"val-{self._config.val_temperature:g}" if partition == "val" else "train"
            self._written = self._writer.submit(self._run.write_rollouts, step, rows, kind=kind, append=continues)
        line: dict[str, Any] = {"step": step, "partition": partition, **total.counts, **total.means()}
        line["seconds"] = {name: round(value, 4) for name, value in total.seconds.items()}
        reason = "" if failed_by_policy(rows) else lasting_failure(rows)
        if reason := reason or (nothing_judged(rows) if partition == "val" else self._failed_steps.add(rows)):
            raise RolloutsFailedError(reason)
        self._rollout_notes.show(rows)
        if partition == "val":
            domain = domains.get(self._config.domain)
            if not self._agent_checked:
                self._agent_checked = True
                models = (call.model for result in results for call in result.trainable_calls)
                few = few_questions(len({row["task_id"] for row in rows}))
                view = AgentView.of(domain, make_reward(self._config, domain), self._config.agent_columns)
                for note in filter(None, [*agent_notes(rows, models, MODEL_NAME), few, gold_in_prompts(results, view)]):
                    _log.warning("%s", note)
            breakdowns = domain.breakdowns
            line[validation_name(self._config.val_temperature)] = compute_accuracy(total.rows, breakdowns)
        self._run.append_rollout_metrics(line)
        busy_s = seconds.get("sampling", 0.0) + seconds.get("update", 0.0)
        metrics = {f"{name}_total": float(count) for name, count in part.counts.items()} | part.means()
        metrics |= flat_numbers(step_figures(part.counts, part.counts))
        metrics["gpu_idle_fraction"] = round(1 - busy_s / max(1e-9, sum(seconds.values())), 4)
        return {f"rollouts/{name}": value for name, value in metrics.items()}

    def finish_writing(self) -> None:
        """Wait until the rollouts of the last :meth:`finish_sampling` are written. Raises why they could not be."""
        self._written.result()

    def _end(self, done: Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            self._error = done.exception()
        with self._lock:
            self._open -= 1
            if not self._open:
                self._changed.set()

    async def _run_group(
        self,
        runs: RolloutCollector | RolloutWorkers,
        prompt: Prompt,
        requests: Sequence[Rollout],
        deadline_s: float,
    ) -> None:
        partition = prompt.partition
        training = partition == "train"
        ended = list[tuple[int, Rollout]]()
        await self._queue.set_status(prompt.uid, partition, "running")
        async for session, result in runs.each(requests, deadline_s=deadline_s):
            ended.append((session, result))
            if any(call.grammar for call in result.trainable_calls) and training and not self._constraint_reported:
                self._constraint_reported = True
                _log.warning("%s", _CONSTRAINED)
        settled = [result for _, result in ended]
        self._scores.settle(settled)
        scored = [
            (session, result, result.outcome.reward) for session, result in ended if result.outcome.reward is not None
        ]
        if failed := [result for result in settled if result.outcome.reward is None]:
            self._last_failure = _failure(failed[-1])
        rows = self._training_rows(prompt, scored)  # which adds the credits to the results
        used = {row.session: row.reward for row in rows}
        if unused := [result for session, result, _ in scored if session not in used]:
            last = unused[-1]
            self._last_failure = _failure(last) or (
                last.outcome.message
                or "the last had a reward, but no call that is trained: see --agent-match, and the traced calls"
                + (f"; {_CONSTRAINED}" if any(call.grammar for call in last.trainable_calls) else "")
                + ("; truncated replies are masked (--truncated mask)" if self._config.truncated == "mask" else "")
            )
        usable = len(used) >= (_MIN_REWARDS if training else 1)
        left_out = sum(not result.made_no_call for result in unused)
        counts = Counter(groups_skipped=int(not usable), **({"dropped_unused": left_out} if left_out else {}))
        replaced = False
        if training:
            self._empty_groups = 0 if usable else self._empty_groups + 1
            teaches = usable and any(row.teaches for row in rows)
            replaced = usable and not teaches and self._replaced[prompt.step] < self._max_replaced
            self._replaced[prompt.step] += replaced
            counts.update(groups=1, groups_used=int(teaches), groups_replaced=int(replaced))
            if teaches:
                counts.update(rollouts_trained=len(used), tokens_trained=sum(sum(row.mask) for row in rows))
        finished = usable and not replaced
        if training:
            counts.update(_batch_counts(rows) if finished else {})
            for result in () if finished else settled:  # it is not trained
                for call in result.calls:
                    call.credit = None
        with self._lock:
            self._counts[partition].update(counts)
            self._results[partition] += settled
        if training and scored and self._schedule is not None:
            self._schedule.add(str(prompt.task["id"]), [reward for _, _, reward in scored])
        if finished:
            await self._queue.put(rows, partition)
        await self._queue.set_status(prompt.uid, partition, "finished" if finished else "failure")
        if not finished:
            self._changed.set()

    def _requests(self, prompts: Sequence[Prompt]) -> Iterator[list[Rollout]]:
        """The group of each of the prompts of a step."""
        config, count, step = self._config, prompts[0].rollouts, prompts[0].step
        tasks = [prompt.task for prompt in prompts]
        groups: Iterable[Sequence[Rollout]]
        if prompts[0].partition == "train":
            of_group = config.model_copy(update={"group_size": count})
            groups = requests_of_step(tasks, of_group, step, drawn=self._drawn[step])
        else:
            temperature = config.val_temperature
            samples = [validation_requests(tasks, config, temperature, sample=sample) for sample in range(count)]
            groups = zip(*samples, strict=True)
        for prompt, group in zip(prompts, groups, strict=True):
            yield [replace(request, group=prompt.uid) for request in group]

    def _training_rows(self, prompt: Prompt, scored: Sequence[tuple[int, Rollout, float]]) -> list[TrainingRow]:
        """The rows of a group. In validation each rollout has one."""
        config = self._config
        if prompt.partition == "train":
            return training_rows(
                scored,
                uid=prompt.uid,
                step=prompt.step,
                credit=self._credit,
                discount=config.credit_discount,
                scale=config.scale_rewards,
                truncated=config.truncated,
                call_cost=config.call_cost,
                agent_match=config.agent_match,
                least=self._scores.least,
            )
        rows = training_rows(scored, uid=prompt.uid, step=prompt.step, credit=None)
        present = {row.session for row in rows}
        missing = [(session, reward) for session, _, reward in scored if session not in present]
        return rows + [self._padding_row(prompt, session, reward) for session, reward in missing]

    def _padding_row(self, prompt: Prompt, session: int, reward: float) -> TrainingRow:
        return TrainingRow(
            key=f"{prompt.uid}_{session}_0",
            uid=prompt.uid,
            session=session,
            prompt_ids=[self._pad_id],
            response_ids=[self._pad_id],
            mask=[0],
            advantages=None,
            logprobs=[0.0],
            reward=reward,
            turns=0,
            first_version=prompt.step,
            last_version=prompt.step,
            step=prompt.step,
        )


def _failure(result: Rollout) -> str:
    return "" if result.succeeded else f"the last failed of {result.outcome.status}: {result.outcome.message[:300]}"


def _batch_counts(rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """The number of the rows' trained tokens, and the sum of the log-probabilities that the sampler had for them."""
    pairs = [pair for row in rows for pair in zip(row.logprobs, row.mask, strict=True)]
    logprobs = [logprob for logprob, trained in pairs if trained]
    return {"batch_tokens": len(logprobs), "batch_logprobs": sum(logprobs)}
