"""Evaluates a policy: rollouts on the validation tasks, like the local trainer's validation.

The first sample of each question has the seed of that validation, so a checkpoint's greedy accuracy is the same here
and in its training run, question by question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groundwire.adapters import Backend
from groundwire.domains import Domain, TaskData
from groundwire.rewards import Reward
from groundwire.tools.step_timer import StepTimer
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.metrics import compute_accuracy, compute_metrics
from groundwire.train.evaluation.notes import RolloutNotes, agent_notes
from groundwire.train.evaluation.stop_reasons import lasting_failure, never_called, nothing_judged
from groundwire.train.evaluation.validation import (
    choose_tasks,
    validation_deadline_s,
    validation_name,
    validation_requests,
)
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.runtime import MODEL_NAME, RolloutRuntime, Upstream
from groundwire.train.store.rollout import Rollout


def evaluate(
    config: RunConfig,
    *,
    data: TaskData,
    domain: Domain,
    backend: Backend,
    reward: Reward,
    run: RunDir,
    callback: ProgressCallback,
    samples: int = 1,
    upstream: Upstream | None = None,
) -> dict[str, Any]:
    """Run every task ``samples`` times at ``config.val_temperature``, write the run's files, return the metrics.

    The policy is ``upstream``, or ``config.model`` served here. Rollouts are written after each sample of all tasks, so
    a killed evaluation keeps those. Raises :class:`groundwire.train.rollouts.errors.RolloutsFailedError` if no rollout
    could be judged, all failed in the same way, or the reward failed for most.
    """
    tasks = choose_tasks(data.validation, config.val_tasks)
    timer = StepTimer()
    runtime = RolloutRuntime(
        engine=upstream or local_engine(config, run, timer),
        backend=backend,
        domain=domain,
        reward=reward,
        timer=timer,
        config=config,
        run=run,
    )
    served = MODEL_NAME if upstream is None else upstream.model
    rollouts: list[Rollout] = []
    notes = RolloutNotes(callback.on_note)
    with runtime:
        for sample in range(samples):
            callback.on_phase_start(f"sample {sample + 1} of {samples}" if samples > 1 else "questions", len(tasks))
            requests = validation_requests(tasks, config, config.val_temperature, sample=sample)
            deadline_s = validation_deadline_s(config, len(requests))
            ended = runtime.run(requests, deadline_s=deadline_s, on_end=callback.on_rollout_end)
            run.write_rollouts(0, ended, kind=f"val-{config.val_temperature:g}-{sample + 1:03d}")
            answers = {str(rollout.task["id"]): rollout.outcome.answer for rollout in ended}
            domain.write_predictions(run.path, tasks, answers, sample)
            rollouts += ended
            if sample == 0:
                model = config.model if upstream is None else ""
                for note in agent_notes(ended, served=served, view=runtime.view, model=model):
                    callback.on_note(note)
            notes.show(ended)
            _check_judged(rollouts, run, last=sample + 1 == samples)
    return _write_metrics(rollouts, config, domain, run, samples=samples, seconds=round(sum(timer.split().values()), 2))


def _check_judged(rollouts: Sequence[Rollout], run: RunDir, *, last: bool) -> None:
    reason = lasting_failure(rollouts) or never_called(rollouts)
    if reason := reason or (nothing_judged(rollouts) if last else ""):
        raise RolloutsFailedError(f"{reason}. More: groundwire why {run.path}")


def _write_metrics(
    rollouts: Sequence[Rollout], config: RunConfig, domain: Domain, run: RunDir, *, samples: int, seconds: float
) -> dict[str, Any]:
    metrics = compute_metrics(rollouts, domain.breakdowns)
    validation = {validation_name(config.val_temperature): compute_accuracy(rollouts, domain.breakdowns)}
    run.append_metrics({"step": 0, **validation, "wall_time_s": seconds})
    run.merge_rollouts()
    run.write_json("evaluation.json", {"model": config.model, "samples": samples, "seconds": seconds, **metrics})
    return metrics


def local_engine(config: RunConfig, run: RunDir, timer: StepTimer) -> Any:
    """The engine of ``config.model`` in this process."""
    from groundwire.train.policy.engine import LocalEngine
    from groundwire.train.policy.model import fitting_length, load_initial_state

    start = load_initial_state(config, run)
    length = fitting_length(start.model, config.max_model_len)
    return LocalEngine(start.model, start.tokenizer, max_model_len=length, max_batch=config.max_batch, timer=timer)
