"""Rollouts for verl's trainer: each prompt becomes a group of rollouts, and each rollout that ends becomes rows.

A prompt's group ends in one of two ways. With two rewards or more it is ``finished``, and what failed is simply not in
it. With fewer there is nothing to compare: its rows are taken out again and it is a ``failure``, which verl replaces by
another prompt. Retries, time limits and cancelling are the store's (:mod:`groundwire.train.rollouts.collector`), so
every group ends. When many groups in a row come to nothing the trainer is told, rather than sent prompt after prompt
for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from groundwire.adapters.tracing import LLMCall
from groundwire.domains import Task
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.diagnosis import nothing_judged
from groundwire.train.evaluation.validation import JUDGED_FAILURES, accuracy, validation_name
from groundwire.train.rollouts.collector import RolloutCollector, RolloutRequest, RolloutResult
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.rows import row
from groundwire.train.rollouts.runtime import RolloutRuntime
from groundwire.train.verl.credit_assignment import TrainingRow, rows
from groundwire.train.verl.transfer_queue import RowQueue

__all__ = ["Prompt", "RolloutService"]

_LEAST = 2  # rewards that a group needs: one has nothing to be compared with
_PATIENCE = 3  # batches of prompts that may come to nothing


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One of verl's prompts: a task, and how many rollouts of it are wanted."""

    uid: str
    task: Task
    rollouts: int
    step: int
    """verl's ``global_steps`` when it sent the prompt."""
    partition: str
    """``train`` or ``val``."""


class RolloutService:
    """Runs prompts' rollouts and leaves their rows in ``queue``; :meth:`submit` returns at once.

    ``pad_id`` is a token for the row of a validation rollout that was judged though it sampled nothing.
    """

    def __init__(self, *, stack: RolloutRuntime, queue: RowQueue, config: RunConfig, run: RunDir, pad_id: int) -> None:
        self._stack, self._queue, self._config, self._run, self._pad_id = stack, queue, config, run, pad_id
        self._lock = threading.Lock()
        self._ended: dict[str, list[RolloutResult]] = {"train": [], "val": []}
        self._skipped: Counter[str] = Counter()
        self._unused: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()
        self._tallies: dict[str, _Tally] = {}
        self._barren, self._why = 0, ""
        self._error: BaseException | None = None

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Enqueue the prompts' rollouts. Raises :class:`RolloutsFailedError` where it is hopeless."""
        self.check()
        # A validation may take as long as the steps would that have as many rollouts.
        steps = sum(prompt.rollouts for prompt in prompts) / (self._config.tasks_per_step * self._config.group_size)
        deadline_s = self._config.step_deadline_s * (max(1.0, steps) if prompts[0].partition == "val" else 1.0)

        async def groups(collector: RolloutCollector) -> None:
            await asyncio.gather(*(self._group(collector, prompt, deadline_s) for prompt in prompts))

        self._stack.begin(groups).add_done_callback(self._note)

    def check(self) -> None:
        """Raises what went wrong in the background, or :class:`RolloutsFailedError`."""
        if self._error is not None:
            raise self._error
        if ended := self._stack.ended_runners():
            raise RolloutsFailedError(ended)
        if self._barren > _PATIENCE * self._config.tasks_per_step:
            raise RolloutsFailedError(
                f"the last {self._barren} prompts had fewer than {_LEAST} rollouts to train on each; {self._why}"
            )

    def take(self, partition: str, step: int, seconds: Mapping[str, float]) -> dict[str, float]:
        """What ended since the last call: the run's folder has all of the step so far, the figures are of this part.

        verl samples several times for one step where it updates several times (``separate_async``) and adds up what has
        ``total`` in its name. ``seconds`` is where the time since the last call went, by
        :data:`groundwire.tools.step_timer.PHASES`.
        """
        with self._lock:
            outcomes, self._ended[partition] = self._ended[partition], []
            skipped, self._skipped[partition] = self._skipped[partition], 0
            unused, self._unused[partition] = self._unused[partition], 0
            groups, self._groups = (self._groups, Counter[str]()) if partition == "train" else (Counter(), self._groups)
        part = _tally(step, outcomes, Counter(groups_skipped=skipped, **groups), seconds, unused)
        before = self._tallies.get(partition)
        if before is not None and before.step != step:
            before = None
        whole = self._tallies[partition] = part if before is None else before + part
        ended = [row(step, outcome) for outcome in outcomes]
        if ended:
            kind = f"val-{self._config.val_temperature:g}" if partition == "val" else "train"
            self._run.write_rollouts(step, ended, kind=kind, append=before is not None)
        line: dict[str, Any] = {"step": step, "partition": partition, **whole.counts, **whole.means()}
        line["seconds"] = {name: round(value, 4) for name, value in whole.seconds.items()}
        if partition == "val":
            if why := nothing_judged(ended):
                raise RolloutsFailedError(why)
            line[validation_name(self._config.val_temperature)] = accuracy(whole.outcomes)
        self._run.append_rollout_metrics(line)
        at_work = seconds.get("sampling", 0.0) + seconds.get("update", 0.0)
        waits = round(1 - at_work / max(1e-9, sum(seconds.values())), 4)
        totals = {f"{name}_total": float(count) for name, count in part.counts.items()}
        told = {**totals, **part.means(), "gpu_idle_fraction": waits}
        return {f"rollouts/{name}": value for name, value in told.items()}

    def _note(self, done: Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            self._error = done.exception()

    async def _group(self, collector: RolloutCollector, prompt: Prompt, deadline_s: float) -> None:
        partition, kept = prompt.partition, list[TrainingRow]()
        await self._queue.mark(prompt.uid, partition, "running")
        rewards: list[float] = []
        async for session, outcome in collector.each(self._jobs(prompt), deadline_s=deadline_s):
            made = self._rows(prompt, session, outcome)
            if made:
                await self._queue.put(made, partition)
                kept += made
                rewards.append(outcome.reward or 0.0)
            unused = outcome.reward is not None and not made
            with self._lock:  # together: the trainer's thread takes both
                self._ended[partition].append(outcome)
                self._unused[partition] += unused
            if unused:
                self._why = "the last had a reward, but no call that is trained: see --agent-match, and what was traced"
            elif outcome.reward is None:
                self._why = f"the last failed of {outcome.status}: {outcome.message[:300]}"
        enough = len(rewards) >= (_LEAST if partition == "train" else 1)
        if not enough:
            with self._lock:
                self._skipped[partition] += 1
            if kept:
                await self._queue.clear([each.key for each in kept], partition)
        if partition == "train":
            self._barren = 0 if enough else self._barren + 1
            with self._lock:  # equal rewards have an advantage of 0: nothing is learnt from such a group
                self._groups.update(groups=1, groups_used=int(len(set(rewards)) > 1))
        await self._queue.mark(prompt.uid, partition, "finished" if enough else "failure")

    def _jobs(self, prompt: Prompt) -> list[RolloutRequest]:
        config, train = self._config, prompt.partition == "train"
        sampling = {
            "temperature": config.temperature if train else config.val_temperature,
            "max_tokens": config.max_tokens,
        }
        job = RolloutRequest(task=prompt.task, group=prompt.uid, mode="train" if train else "val", sampling=sampling)
        return [job] * prompt.rollouts

    def _rows(self, prompt: Prompt, session: int, outcome: RolloutResult) -> list[TrainingRow]:
        """The rows of a rollout: none where it has no reward, except for what validation judges as wrong."""
        config, reward = self._config, outcome.reward
        validating = prompt.partition == "val"
        if reward is None and validating and outcome.status in JUDGED_FAILURES:
            reward = 0.0
        if reward is None:
            return []
        made = rows(
            outcome,
            uid=prompt.uid,
            session=session,
            step=prompt.step,
            reward=reward,
            credit="broadcast" if validating else config.credit,
            discount=config.credit_discount,
            agent_match=None if validating else config.agent_match,
        )
        if made or not validating:
            return made
        return [self._blank(prompt, session, reward)]

    def _blank(self, prompt: Prompt, session: int, reward: float) -> TrainingRow:
        return TrainingRow(
            key=f"{prompt.uid}_{session}_0",
            uid=prompt.uid,
            session=session,
            prompt_ids=[self._pad_id],
            response_ids=[self._pad_id],
            mask=[0],
            logprobs=[0.0],
            reward=reward,
            turns=0,
            first_version=prompt.step,
            last_version=prompt.step,
            step=prompt.step,
        )


@dataclass(frozen=True)
class _Tally:
    """What became of the rollouts of a step, or of a part of one."""

    step: int
    outcomes: list[RolloutResult]
    """Without their tokens, which are most of them."""
    counts: Counter[str]
    """What may be added up over the parts of a step."""
    seconds: Counter[str]

    def __add__(self, more: _Tally) -> _Tally:
        # Counter's own sum would leave out what is 0.
        counts, seconds = Counter(self.counts), Counter(self.seconds)
        counts.update(more.counts)
        seconds.update(more.seconds)
        return _Tally(self.step, self.outcomes + more.outcomes, counts, seconds)

    def means(self) -> dict[str, float]:
        """What may not be added up; of no rollouts there is nothing."""
        result: dict[str, float] = {}
        if took := [outcome.seconds for outcome in self.outcomes]:
            result |= {"seconds_mean": round(mean(took), 3), "seconds_max": round(max(took), 3)}
        if scored := [outcome.reward for outcome in self.outcomes if outcome.reward is not None]:
            result["reward_mean"] = mean(scored)
        return result


def _tally(
    step: int, outcomes: Sequence[RolloutResult], groups: Counter[str], seconds: Mapping[str, float], unused: int
) -> _Tally:
    failed = Counter(outcome.status for outcome in outcomes if outcome.reward is None)
    if unused:
        failed["unused"] = unused
    counts = Counter(
        ended=len(outcomes),
        dropped=failed.total(),
        retried=sum(outcome.attempts > 1 for outcome in outcomes),
        calls=sum(len(outcome.calls) for outcome in outcomes),
        tokens_sampled=sum(len(call.response_ids) for outcome in outcomes for call in outcome.calls),
        **{f"dropped_{kind}": number for kind, number in failed.items()},
        **groups,
    )
    return _Tally(step, [_light(outcome) for outcome in outcomes], counts, Counter(seconds))


def _light(outcome: RolloutResult) -> RolloutResult:
    calls = [
        LLMCall(rollout_id=call.rollout_id, attempt_id=call.attempt_id, sequence=call.sequence)
        for call in outcome.calls
    ]
    return replace(outcome, calls=calls, untrainable=(), steps=())
