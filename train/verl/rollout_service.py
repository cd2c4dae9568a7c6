"""Runs rollouts for verl's trainer: each prompt becomes a group of rollouts, and each finished rollout becomes rows.

A prompt takes this way: :meth:`RolloutService.submit` gives it a task and seeds, ``_run_group`` waits for its rollouts,
``_train`` or ``_validate`` makes their rows, the queue gets these, and at the end of the sampling
:class:`.metrics.SampledSteps` gets the rollouts.

A group with fewer than two rewards has nothing to compare: it has no rows and is a ``failure``, which verl replaces by
another prompt. So is a group without a gradient, as long as the ``sampling_budget`` of its step allows. After many
failed groups in a row the trainer gets an error instead of one new prompt after another.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

from groundwire.domains import Task
from groundwire.train.algorithms.credit import TrainingGroup, training_items
from groundwire.train.algorithms.distillation import Teacher, teacher_counts
from groundwire.train.algorithms.task_schedule import TaskSchedule
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.validation import validation_requests
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.outcome import FailureScores, requests_of_step
from groundwire.train.store.rollout import Rollout
from groundwire.train.verl.metrics import SampledSteps
from groundwire.train.verl.rows import TrainingRow, TransferQueueRows, training_rows

if TYPE_CHECKING:
    from groundwire.train.rollouts.collector import RolloutCollector
    from groundwire.train.rollouts.runtime import RolloutRuntime
    from groundwire.train.verl.rollout_workers import RolloutWorkers

_MIN_REWARDS = 2  # per training group: a single reward has nothing to be compared with
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


@dataclass
class _Ended:
    """The rollouts of a partition that have ended since verl's trainer asked for them, and counts of their groups."""

    rollouts: list[Rollout] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(groups_skipped=0))


@dataclass
class _Step:
    """The groups of a training step so far: of each task, and those that were replaced by another."""

    drawn: Counter[str] = field(default_factory=Counter)
    replaced: int = 0


@dataclass(kw_only=True, eq=False)
class RolloutService:
    """Runs the rollouts of prompts and puts their rows into ``queue``; :meth:`submit` returns at once.

    ``pad_id`` is the only token in the row of a validation rollout that sampled none but counts as wrong. Without
    ``own_advantages`` verl computes them. Without ``schedule`` verl's loader chooses the tasks.
    """

    runtime: RolloutRuntime | RolloutWorkers
    queue: TransferQueueRows
    config: RunConfig
    run: RunDir
    pad_id: int
    own_advantages: bool = True
    schedule: TaskSchedule | None = None
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        # A validation judges what the agent has sampled, whatever of it would be trained.
        judged = {"credit": "broadcast", "truncated": "train", "agent_match": None}
        self._validation_config = self.config.model_copy(update=judged)
        self._scores = FailureScores(self.config.failures, self.run)
        self._steps = defaultdict[int, _Step](_Step)
        self._empty_groups, self._last_failure = 0, ""  # training groups in a row that had no use, and why
        # verl's trainer reads what the event loop's thread writes.
        self._lock = threading.Lock()
        self._ended = {"train": _Ended(), "val": _Ended()}
        self._open = 0
        self._changed = threading.Event()  # set when a group has failed, or all have ended
        self._error: BaseException | None = None
        self.metrics = SampledSteps(self.config, self.run)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Enqueue the prompts' rollouts. Raises as :meth:`check` does."""
        self.check()
        # verl's loader says how many tasks a step begins with, and its sampler when one is replaced. Which tasks these
        # are is up to the schedule, the same as the local trainer's.
        if self.schedule is not None and prompts[0].partition == "train":
            prompts = [replace(prompt, task=self.schedule.draw(prompt.step)) for prompt in prompts]
        # A validation that runs as many rollouts as several training steps has the time of those steps.
        steps = sum(prompt.rollouts for prompt in prompts) / (self.config.tasks_per_step * self.config.group_size)
        deadline_s = self.config.step_deadline_s * (max(1.0, steps) if prompts[0].partition == "val" else 1.0)
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
        if self._empty_groups > _MAX_EMPTY_BATCHES * self.config.tasks_per_step:
            raise RolloutsFailedError(
                f"the last {self._empty_groups} prompts had fewer than {_MIN_REWARDS} rollouts to train on each; "
                f"{self._last_failure}"
            )

    def finish_sampling(self, partition: str, step: int, seconds: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the rollouts that ended since the last call. A thread writes the rollouts to the run directory.

        ``seconds`` is the time since the last call by phase (:data:`groundwire.train.step_timer.PHASES`).
        """
        with self._lock:
            ended, self._ended[partition] = self._ended[partition], _Ended()
        if partition == "val":  # as a whole: some groups ended before the least reward was known
            self._scores.settle(ended.rollouts)
        if lost := self.runtime.runners_lost():
            ended.counts["runners_lost"] = lost
        for rollout in ended.rollouts:
            rollout.step = step
        return self.metrics.add(partition, step, ended.rollouts, ended.counts, seconds)

    def _end(self, done: Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            self._error = done.exception()
        with self._lock:
            self._open -= 1
            if not self._open:
                self._changed.set()

    def _requests(self, prompts: Sequence[Prompt]) -> Iterator[list[Rollout]]:
        """The group of each of the prompts of a step."""
        config, count, step = self.config, prompts[0].rollouts, prompts[0].step
        tasks = [prompt.task for prompt in prompts]
        groups: Iterable[Sequence[Rollout]]
        if prompts[0].partition == "train":
            of_group = config.model_copy(update={"group_size": count})
            groups = requests_of_step(tasks, of_group, step, drawn=self._steps[step].drawn)
        else:
            made = validation_requests(tasks, config, config.val_temperature, step=step, samples=range(count))
            groups = (made[place :: len(tasks)] for place in range(len(tasks)))
        for prompt, group in zip(prompts, groups, strict=True):
            yield [replace(request, group=prompt.uid) for request in group]

    async def _run_group(
        self, runs: RolloutCollector | RolloutWorkers, prompt: Prompt, requests: Sequence[Rollout], deadline_s: float
    ) -> None:
        """Run the rollouts of a prompt and store their rows. Without rows verl replaces the prompt by another."""
        partition = prompt.partition
        await self.queue.set_status(prompt.uid, partition, "running")
        ended = await runs.run(requests, deadline_s=deadline_s)
        self._scores.settle(ended)
        scored = {session: rollout for session, rollout in enumerate(ended) if rollout.outcome.reward is not None}
        if partition == "train":
            if self.teacher is not None:
                await asyncio.to_thread(self.teacher.judge, ended)
            rows, counts = self._train(prompt, ended, scored)
            if self.teacher is not None:
                counts.update(teacher_counts(ended, self.config.agent_match))
        else:
            rows = self._validate(prompt, scored)
            counts = Counter(groups_skipped=int(not rows))
        with self._lock:
            self._ended[partition].rollouts += ended
            self._ended[partition].counts.update(counts)
        if rows:
            await self.queue.put(rows, partition)
        await self.queue.set_status(prompt.uid, partition, "finished" if rows else "failure")
        if not rows:
            self._changed.set()

    def _train(
        self, prompt: Prompt, ended: Sequence[Rollout], scored: Mapping[int, Rollout]
    ) -> tuple[list[TrainingRow], Counter[str]]:
        """The rows of a training group, none if it is not trained, and counts for the metrics."""
        config, step = self.config, self._steps[prompt.step]
        group, rows = self._group(prompt, scored, config, own_advantages=self.own_advantages)
        used = {row.session for row in rows}
        self._note_unused([rollout for session, rollout in enumerate(ended) if session not in used])
        usable = len(used) >= _MIN_REWARDS
        self._empty_groups = 0 if usable else self._empty_groups + 1
        teaches = usable and group.teaches
        # verl's sampler asks for another prompt when a group has no rows. So dynamic sampling is to withhold them while
        # the budget lasts, where the local trainer's loop starts groups itself (sample_groups).
        budget = config.most_groups - config.tasks_per_step
        replaced = usable and not teaches and step.replaced < budget
        step.replaced += replaced
        counts = Counter(groups=1, groups_used=teaches, groups_replaced=replaced, groups_skipped=not usable)
        if unused := sum(not rollout.made_no_call for session, rollout in scored.items() if session not in used):
            counts["dropped_unused"] = unused
        if teaches:
            counts.update(rollouts_trained=len(used), tokens_trained=sum(sum(row.mask) for row in rows))
        if replaced or not usable:
            return [], counts
        if self.own_advantages:
            group.record()
        # Those that the sampler had for the trained tokens.
        logprobs: Any = [value for row in rows for value in compress(row.logprobs, row.mask)]
        counts.update(batch_tokens=len(logprobs), batch_logprobs=sum(logprobs))
        return rows, counts

    def _validate(self, prompt: Prompt, scored: Mapping[int, Rollout]) -> list[TrainingRow]:
        """The rows of a validation group. Each rollout with a reward has one; verl needs a token in it."""
        _, rows = self._group(prompt, scored, self._validation_config, own_advantages=False)
        steps: Any = dict.fromkeys(("step", "first_version", "last_version"), prompt.step)
        empty: Any = {"prompt_ids": [self.pad_id], "response_ids": [self.pad_id], "mask": [0], "logprobs": [0.0]}
        return rows + [
            TrainingRow(uid=prompt.uid, session=session, reward=scored[session].outcome.reward or 0.0, **empty, **steps)
            for session in sorted(scored.keys() - {row.session for row in rows})
        ]

    def _group(
        self, prompt: Prompt, scored: Mapping[int, Rollout], config: RunConfig, *, own_advantages: bool
    ) -> tuple[TrainingGroup, list[TrainingRow]]:
        """What a group trains, and that as rows."""
        groups = training_items(list(scored.values()), config, least=self._scores.least)
        group = groups[0] if groups else TrainingGroup(rollouts=[], differs=False)
        rows = training_rows(group, scored, prompt.step, config.agent_match, own_advantages=own_advantages)
        return group, rows

    def _note_unused(self, rollouts: Sequence[Rollout]) -> None:
        """Remember why the last of these rollouts is not trained."""
        if not rollouts:
            return
        outcome = rollouts[-1].outcome
        if outcome.failure:
            self._last_failure = f"the last failed of {outcome.status}: {outcome.message[:300]}"
            return
        self._last_failure = outcome.message or (
            "the last had a reward, but no call that is trained: see --agent-match, and the traced calls"
            + ("; truncated replies are masked (--truncated mask)" if self.config.truncated == "mask" else "")
        )
