"""Evaluates a policy: rollouts on the validation tasks, like the local trainer's validation.

The first sample of each question has the seed of that validation, so a checkpoint's greedy accuracy is the same here
and in its training run, question by question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from groundwire.adapters.tracing.replay import Replay
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.metrics import compute_accuracy, compute_metrics
from groundwire.train.evaluation.notes import RolloutNotes, agent_notes, lasting_failure, never_called, nothing_judged
from groundwire.train.evaluation.probe_endpoint import probe_endpoint
from groundwire.train.evaluation.validation import (
    choose_tasks,
    validation_deadline_s,
    validation_name,
    validation_requests,
)
from groundwire.train.evaluation.verdict import AgentVerdict, pass_rate, verdict
from groundwire.train.job.job import Job
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.runtime import RolloutRuntime, Upstream
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout


def evaluate(
    job: Job, *, run: RunDir, callback: ProgressCallback, samples: int = 1, upstream: Upstream | None = None
) -> dict[str, Any]:
    """Run every task ``samples`` times at ``val_temperature``, write the run's files, return the metrics.

    Rollouts are written after each sample of all tasks, so a killed evaluation keeps those. Raises
    :class:`RolloutsFailedError` if no rollout could be judged, all failed in the same way, or the reward failed for
    most.
    """
    config, timer = job.config, StepTimer()
    tasks = choose_tasks(job.data.validation, config.val_tasks)
    rollouts: list[Rollout] = []
    notes = RolloutNotes(callback.on_note, failures=False)
    with runtime_of(job, run=run, timer=timer, upstream=upstream) as runtime:
        together = samples if runtime.view.compares else 1
        if runtime.view.compares:
            callback.on_note("answers are ranked among those to the same task: the accuracy of any model is 0.5")
        for sample in range(samples):
            if sample % together == 0:
                name = f"sample {sample + 1} of {samples}" if together < samples else "questions"
                callback.on_phase_start(name, together * len(tasks))
                numbers = range(sample, sample + together)
                batch = validation_requests(tasks, config, config.val_temperature, samples=numbers)
                deadline_s = validation_deadline_s(config, len(batch))
                batch = runtime.run(batch, deadline_s=deadline_s, on_end=callback.on_rollout_end)
            ended, batch = batch[: len(tasks)], batch[len(tasks) :]
            run.write_rollouts(0, ended, kind=f"val-{config.val_temperature:g}-{sample + 1:03d}")
            answers = {str(rollout.task["id"]): rollout.outcome.answer for rollout in ended}
            job.domain.write_predictions(run.path, tasks, answers, sample)
            rollouts += ended
            reason = lasting_failure(rollouts) or never_called(rollouts)
            reason = reason or (nothing_judged(rollouts) if sample + 1 == samples else "")
            if sample == 0:
                found = first_verdict(job, runtime, ended, ids=False)
                for note in [*found.notes, *([] if reason else found.problems)]:
                    callback.on_note(note)
            notes.show(ended)
            if reason:
                raise RolloutsFailedError(f"{reason}. More: groundwire why {run.path}")
        lost = {"runners_lost": count} if (count := runtime.runners_lost()) else {}
    seconds, breakdowns = round(sum(timer.split().values()), 2), job.domain.breakdowns
    metrics = compute_metrics(rollouts, breakdowns)
    validation = {validation_name(config.val_temperature): compute_accuracy(rollouts, breakdowns)}
    run.append_metrics({"step": 0, **validation, **lost, "wall_time_s": seconds})
    run.merge_rollouts()
    run.write_json(
        "evaluation.json", {"model": config.model, "samples": samples, "seconds": seconds, **lost, **metrics}
    )
    return metrics


def try_tasks(
    job: Job,
    *,
    run: RunDir,
    callback: ProgressCallback,
    count: int,
    samples: int = 0,
    show: Callable[[Rollout, AgentView], None] = lambda rollout, view: None,
) -> tuple[list[Rollout], AgentVerdict]:
    """Run ``count`` tasks, of training as well if validation has less than half of them, ``show`` each as it ends, and
    write nothing; returns them and a verdict. A reward that compares answers gets half as many tasks, two answers each.

    With ``samples``, a model that is trained also answers each task that many times as in training, which the notes
    tell of.
    """
    config = job.config
    answers, temperature = (2, config.temperature) if job.view.compares else (1, config.val_temperature)
    count //= answers
    tasks = choose_tasks(job.data.validation, count)
    tasks += choose_tasks(job.data.train, count - len(tasks)) if 2 * len(tasks) < count else []
    requests = validation_requests(tasks, config, temperature, samples=range(answers))
    callback.on_phase_start("tasks", len(requests))
    with runtime_of(job, run=run, timer=StepTimer()) as runtime:
        ended = runtime.run(
            requests,
            deadline_s=config.step_deadline_s,
            on_end=callback.on_rollout_end,
            show=lambda rollout: show(rollout, runtime.view),
        )
        found = first_verdict(job, runtime, ended, ids=job.endpoint is None)
        if samples and not found.problems and job.endpoint is None and job.trainer.updates_model:
            again = validation_requests(tasks, config, config.temperature, samples=range(samples))
            callback.on_phase_start("samples", len(again))
            sampled = runtime.run(again, deadline_s=config.step_deadline_s, on_end=callback.on_rollout_end)
            said, advice = pass_rate(sampled, max_tokens=config.max_tokens)
            found = AgentVerdict(found.problems, [*found.notes, *filter(None, [said])], advice)
    if not found.problems:  # which say it already
        RolloutNotes(found.notes.append).show(ended)
    return ended, found


def first_verdict(job: Job, runtime: RolloutRuntime, rollouts: Sequence[Rollout], *, ids: bool) -> AgentVerdict:
    """The verdict on the first rollouts of a job, with :func:`.notes.agent_notes`; ``ids`` as for :func:`.verdict`."""
    match, updates_model = job.config.agent_match, job.trainer.updates_model
    found = verdict(rollouts, runtime.view, ids=ids, agent_match=match, updates_model=updates_model)
    model = job.config.model if job.endpoint is None else ""
    notes = agent_notes(rollouts, served=runtime.model_name, view=runtime.view, model=model)
    return AgentVerdict(found.problems, [*notes, *found.notes])


def runtime_of(
    job: Job, *, run: RunDir, timer: StepTimer, upstream: Upstream | None = None, replay: Replay | None = None
) -> RolloutRuntime:
    """What runs the rollouts of a job whose model is not trained: at its endpoint, or served here."""
    upstream = upstream or upstream_of(job)
    if upstream is not None:
        return job.runtime(upstream, run=run, timer=timer, replay=replay)
    from groundwire.train.policy.engine import LocalEngine
    from groundwire.train.policy.model import fitting_length, load_initial_state

    config, start = job.config, load_initial_state(job.config, run)
    length = fitting_length(start.model, config.max_model_len)
    limits = {"max_model_len": length, "max_batch": config.max_batch}
    engine = LocalEngine(start.model, start.tokenizer, **limits, bf16=config.bf16, timer=timer)
    return job.runtime(engine, run=run, timer=timer, replay=replay)


def upstream_of(job: Job) -> Upstream | None:
    """The policy at the job's endpoint, which is asked first what it accepts; None without one."""
    if job.endpoint is None:
        return None
    config, url, key = job.config, job.endpoint.base_url, job.endpoint.api_key
    sampling = {"temperature": config.val_temperature, "max_tokens": config.max_tokens, "seed": config.seed}
    probe = probe_endpoint(url, model=config.model, api_key=key, sampling=sampling)
    return Upstream(base_url=url.rstrip("/"), model=config.model, api_key=key, ids=probe.accepts_ids)
