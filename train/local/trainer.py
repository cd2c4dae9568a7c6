"""The training loop on one machine: sample rollouts, score them, update the model, validate, write the metrics.

The run directory is complete after each step, so a killed run loses at most the steps since its last checkpoint. A run
that is interrupted or fails writes a checkpoint of its last complete step first, unless it is interrupted again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from groundwire.tools.machine import processors
from groundwire.tools.secrets import say
from groundwire.train.algorithms.credit import TrainingGroup, training_items
from groundwire.train.algorithms.distillation import Teacher, teacher_counts, teacher_means
from groundwire.train.algorithms.health import HealthRules, reply_counts, step_figures
from groundwire.train.algorithms.speed import device_name, step_speed
from groundwire.train.algorithms.task_schedule import TaskSchedule, sample_groups
from groundwire.train.artifacts.metrics_lines import add_lost_runners
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.tracking import open_trackers
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.evaluator import first_verdict
from groundwire.train.evaluation.metrics import component_means, compute_accuracy, few_questions, scores_by_question
from groundwire.train.evaluation.notes import (
    FailedSteps,
    RolloutNotes,
    failed_by_policy,
    lasting_failure,
    nothing_judged,
    nothing_to_train,
)
from groundwire.train.evaluation.validation import (
    choose_tasks,
    validation_deadline_s,
    validation_missing,
    validation_name,
    validation_requests,
    validation_temperatures,
)
from groundwire.train.evaluation.verdict import cannot_begin, pass_rate
from groundwire.train.job.graceful_shutdown import GracefulShutdown
from groundwire.train.job.job import Job
from groundwire.train.local.grpo import GRPO, check_state
from groundwire.train.local.lora import LORA_ALPHA, add_adapters, check_rank, merged_weights
from groundwire.train.local.memory_plan import settings_for_model
from groundwire.train.policy.constraint import Constraints
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.errors import NonFiniteGradientError
from groundwire.train.policy.model import all_threads, fitting_length, load_initial_state, load_start
from groundwire.train.policy.pretrained.model_files import save_policy
from groundwire.train.policy.vllm.engine import VLLMEngine
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout

_SHORTER = 64  # questions of the validations during training
_MAX_EMPTY_STEPS = 3  # consecutive steps without training data that end a run
_MAX_SKIPPED_UPDATES = 5  # consecutive updates that were skipped for a gradient that is not finite, which end a run
_ROUNDING = 1e-9


class LocalTrainer:
    """One training run. ``shutdown`` decides when a signal may interrupt it; ``vllm`` samples if it is given."""

    def __init__(
        self,
        job: Job,
        *,
        run: RunDir,
        callback: ProgressCallback,
        shutdown: GracefulShutdown | None = None,
        vllm: VLLMEngine | None = None,
    ) -> None:
        config = job.config
        self._job, self.config, self.run, self.callback = job, config, run, callback
        self.shutdown = shutdown or GracefulShutdown()
        self.started = time.monotonic()
        self.threads = all_threads()
        self.timer = StepTimer()
        initial = load_initial_state(config, run, check_state)
        if initial.note:
            say(f"note: {initial.note}", err=True)
        self.model, self.tokenizer = initial.model, initial.tokenizer
        if initial.state is not None:
            check_rank(initial.state, config.lora_rank)
        if config.lora_rank:
            self.model = load_start(config)  # a checkpoint's weights are merged with its adapters
            add_adapters(self.model, rank=config.lora_rank, alpha=LORA_ALPHA, seed=config.seed)
        max_model_len = fitting_length(self.model, config.max_model_len)
        self.grpo = GRPO(
            self.model,
            settings_for_model(config, self.model, max_model_len),
            seed=config.seed,
            reference=(self.model if config.lora_rank else load_start(config)) if config.kl_coef else None,
            constraints=Constraints(self.model, self.tokenizer, by_vllm=vllm is not None),
        )
        callback.timer, self.grpo.on_pass = self.timer, callback.on_rollout_end
        if initial.state is not None and (note := self.grpo.load_state(initial.state)):
            callback.on_note(note)
        self.first_step = run.rewind()
        self._schedule = TaskSchedule(job.data.train, config)
        self._health = HealthRules(run.metrics())
        self._rollout_notes = RolloutNotes(callback.on_note, run=run.path, credit=config.credit)
        self.earlier_s = next((line["wall_time_s"] for line in reversed(run.metrics()) if "wall_time_s" in line), 0.0)
        self._model_step: int | None = self.first_step  # None during an update
        self._unwritten_line: dict[str, Any] | None = None  # metrics of that step, until its validation is complete
        self._is_advised = False
        self._scores: dict[str, dict[str, float]] = {}  # of the questions of the last validations
        # A run that has not collected any data yet ends at its first empty step.
        self._steps_without_data, self._failed_steps = _MAX_EMPTY_STEPS - 1, FailedSteps()
        self.engine: LocalEngine | VLLMEngine
        if vllm is not None:
            vllm.attach(self.model, self.tokenizer, timer=self.timer)
            self.engine = vllm
        else:
            limits = {"max_model_len": max_model_len, "max_batch": config.max_batch}
            bf16 = self.grpo.config.bf16
            self.engine = LocalEngine(self.model, self.tokenizer, **limits, bf16=bf16, timer=self.timer)
        self._teacher = Teacher(config, self.tokenizer) if config.teacher else None
        self._update_engine(self.first_step)
        self.runtime = job.runtime(self.engine, run=run, timer=self.timer)

    def train(self) -> None:
        """Run the remaining steps. :func:`groundwire.train.evaluation.run_reader.summarize` reads their result."""
        config = self.config
        with (
            self.runtime,
            open_trackers(config, self.run, first_step=self.first_step) as self.log_metrics,
            self._checkpoint_on_error(),
        ):
            lines = self.run.metrics()
            if not any(line["step"] == 0 for line in lines):
                self._write_metrics({"step": 0, **self._validate(0)})
            elif validation_missing(config, line := lines[-1]):  # the run was interrupted between a step and it
                complete = {**line, **self._validate(line["step"]), "wall_time_s": self._wall_time_s()}
                self.run.write_metrics([*self.run.metrics()[:-1], complete])
                self._show_metrics(complete)
                self._keep_best(complete)
            for step in range(self.first_step + 1, config.steps + 1):
                self._train_step(step)

    def _train_step(self, step: int) -> None:
        config = self.config
        self.timer.split()
        before = self.engine.generated_tokens
        results = self._sample(step)
        generated = self.engine.generated_tokens - before
        if self._teacher is not None:
            self._teacher.judge(results)
        groups = self._training_items(results)
        for group in groups:
            group.record()  # the run's files show what is trained
        self.run.write_rollouts(step, results)
        self._check_trainable(results)
        if step == 1:
            self._advise(results)
        with self.shutdown.critical_section(f"the update of step {step}"):
            self._model_step = None
            line = self._update(step, results, groups, generated)
            self._unwritten_line = line | step_figures(line, reply_counts(results, config.agent_match))
            self._model_step = step
        line = self._unwritten_line | self._validate(step)
        with self.shutdown.critical_section(f"writing step {step}"):
            self._model_step = None  # without its metrics the step is not complete
            self._write_metrics(line)
            self._model_step, self._unwritten_line = step, None
            if step == config.steps or step % config.checkpoint_every == 0:
                self._write_checkpoint(step)
            self._keep_best(line)
        if self.grpo.skipped_in_a_row >= _MAX_SKIPPED_UPDATES:
            raise NonFiniteGradientError(
                f"the gradients of {self.grpo.skipped_in_a_row} updates in a row are not finite, and none was applied: "
                f"lower learning_rate ({config.learning_rate:g})"
                + (" or train with precision=fp32" if self.grpo.config.bf16 else "")
            )

    def _sample(self, step: int) -> list[Rollout]:
        """Run the step's rollouts, with dynamic sampling if the budget is larger than one step's."""
        config = self.config
        groups = self._schedule.groups(step)
        if config.sampling_budget == 1:
            requests = [request for group in groups for request in group]
            return self._collect(f"step {step}: sample", requests, config.step_deadline_s)
        first = self._schedule.groups_to_start(self.run.metrics())
        self.callback.on_phase_start(f"step {step}: sample", first * config.group_size)
        results = self.runtime.call(
            lambda collector: sample_groups(
                partial(collector.run, on_end=self.callback.on_rollout_end),
                groups,
                first=first,
                wanted=config.tasks_per_step,
                compare=self._training_items,
                deadline_s=config.step_deadline_s,
            )
        )
        self.runtime.scores.settle(results)  # again, as the whole step
        return results

    def _collect(self, name: str, requests: list[Rollout], deadline_s: float) -> list[Rollout]:
        self.callback.on_phase_start(name, len(requests))
        return self.runtime.run(requests, deadline_s=deadline_s, on_end=self.callback.on_rollout_end)

    def _update(
        self, step: int, results: Sequence[Rollout], groups: Sequence[TrainingGroup], generated: int
    ) -> dict[str, Any]:
        """Train on the step's rollouts; returns the step's metrics without its validation."""
        with self.timer.busy("update"):
            torch.set_num_threads(self.threads)  # the engine uses fewer, and MKL's number is the process's
            trained = sum(len(group.items) for group in groups if group.has_gradient)
            self.callback.on_phase_start(f"step {step}: update", trained, "trajectories")
            self.engine.sleep()
            metrics = self.grpo.update(groups)
            self._update_engine(step)
        rewards = [result.outcome.reward for result in results if result.outcome.reward is not None]
        silent, components = sum(result.made_no_call for result in results), component_means(results)
        seconds = self.timer.split()
        sampling = self.grpo.cost.sampling(call for result in results for call in result.calls)
        gpus = dict.fromkeys(("gpus", "training_gpus"), int(self.model.device.type != "cpu"))
        update_flops = metrics.pop("update_flops", 0.0)
        line = {
            "step": step,
            "reward": round(sum(rewards) / len(rewards), 4) if rewards else None,
            **({"reward_components": components} if components else {}),
            "rollouts": len(results),
            "failures": dict(Counter(result.outcome.status for result in results if not result.succeeded)),
            "dropped": len(results) - len(rewards),
            **({"without_calls": silent} if silent else {}),
            "retried": sum(result.attempt is not None and result.attempt.number > 1 for result in results),
            "calls": sum(len(result.trainable_calls) for result in results),
            "tokens_generated": generated,
            **{name: round(value, 6) for name, value in metrics.items() if math.isfinite(value)},
            **(teacher_means(teacher_counts(results, self.config.agent_match)) if self._teacher else {}),
            "tokens_per_s": round(generated / max(1e-9, sum(seconds.values())), 1),
            "seconds": {phase: round(value, 4) for phase, value in seconds.items()},
            "flops": {"sampling": sampling, "update": update_flops},
            "machine": {"device": device_name(str(self.model.device)), **gpus, "cores": processors()},
        }
        tokens = sum(len(item.trajectory) for group in groups for item in group.items)
        times = {"step_s": sum(seconds.values()), "update_s": seconds["update"]}
        return line | {"speed": step_speed(line, tokens=tokens, **times)}

    def _training_items(self, results: Sequence[Rollout]) -> list[TrainingGroup]:
        return training_items(results, self.config, least=self.runtime.scores.least)

    def _update_engine(self, step: int) -> None:
        with merged_weights(self.model):
            self.engine.update_weights(step)

    def _validate(self, step: int) -> dict[str, Any]:
        """The validations that are due at ``step``, by their names in the metrics."""
        config = self.config
        count = config.val_tasks if step in (0, config.steps) else min(config.val_tasks or _SHORTER, _SHORTER)
        tasks = choose_tasks(self._job.data.validation, count)
        if step == 0 and (note := few_questions(len(tasks))):
            self.callback.on_note(note)
        validations: dict[str, Any] = {}
        looked_at: list[Rollout] = []
        for temperature in validation_temperatures(config, step):
            requests = validation_requests(tasks, config, temperature, step=step)
            deadline_s = validation_deadline_s(config, len(requests))
            results = self._collect(f"validate at temperature {temperature:g}", requests, deadline_s)
            self.run.write_rollouts(step, results, kind=f"val-{temperature:g}")
            if step == 0:
                looked_at += results
                if reason := cannot_begin(results, agent_match=config.agent_match):
                    raise RolloutsFailedError(reason)
            self._check_judged(results)
            self._rollout_notes.show(results)
            name = validation_name(temperature)
            validations[name] = compute_accuracy(results, self._job.domain.breakdowns)
            self._scores[name] = {task: mean(scores) for task, scores in scores_by_question(results).items()}
        if looked_at:
            found = first_verdict(self._job, self.runtime, looked_at, ids=True)
            for note in found.notes:
                self.callback.on_note(note)
            if found.problems:
                raise RolloutsFailedError("; ".join(found.problems))
            if not any(result.outcome.reward for result in results):  # the last ones are sampled as in training
                self._advise(results)
        return validations

    def _advise(self, sampled: Sequence[Rollout]) -> None:
        """Say once, before time is spent, what helps a model whose first sampled rollouts teach nothing."""
        _, advice = pass_rate(sampled, max_tokens=self.config.max_tokens)
        if advice and not self._is_advised:
            self._is_advised = True
            self.callback.on_note(advice)

    def _check_trainable(self, results: Sequence[Rollout]) -> None:
        """Raise :class:`RolloutsFailedError` if several steps in a row gave no training data."""
        self._check_judged(results)
        if reason := self._failed_steps.add(results):
            raise RolloutsFailedError(reason)
        if not failed_by_policy(results):
            reason = nothing_judged(results) or nothing_to_train(results, agent_match=self.config.agent_match)
        self._steps_without_data = self._steps_without_data + 1 if reason else 0
        if self._steps_without_data >= _MAX_EMPTY_STEPS:
            raise RolloutsFailedError(reason)
        self._rollout_notes.show(results)

    def _check_judged(self, results: Sequence[Rollout]) -> None:
        """Raise :class:`RolloutsFailedError` if all failed for a reason that will persist, or most rewards did."""
        if not failed_by_policy(results) and (reason := lasting_failure(results)):
            raise RolloutsFailedError(reason)

    def _write_metrics(self, line: dict[str, Any]) -> None:
        line["wall_time_s"] = self._wall_time_s()
        if lost := self.runtime.runners_lost():
            line["runners_lost"] = lost
        self.run.append_metrics(line)
        self._show_metrics(line)

    def _show_metrics(self, line: dict[str, Any]) -> None:
        self.log_metrics(line)
        self.callback.on_step_end(line)
        for warning in self._health.check(line):
            self.callback.on_note(warning)

    def _wall_time_s(self) -> float:
        return round(self.earlier_s + time.monotonic() - self.started, 2)

    @contextmanager
    def _checkpoint_on_error(self) -> Iterator[None]:
        """If the block fails, write a checkpoint of the last complete step, so that the run can be resumed there."""
        try:
            yield
        except BaseException:
            step, line = self._model_step, self._unwritten_line
            with suppress(OSError):
                self._count_lost_runners()
            if step and not self.shutdown.immediate and self.run.checkpoints.last_step() != step:
                # On a full disk the previous checkpoint remains, and the first error is the one to report.
                with suppress(OSError), self.shutdown.critical_section("writing a checkpoint"):
                    if line is not None:
                        self._write_metrics(line)
                    self._write_checkpoint(step)
            raise

    def _count_lost_runners(self) -> None:
        """Add those of a step that does not end to the last line."""
        if lost := self.runtime.runners_lost():
            self.run.write_metrics(add_lost_runners(self.run.metrics(), lost))

    def _write_checkpoint(self, step: int) -> None:
        with self.run.checkpoints.write(step) as folder:
            self._save_policy(folder)
            torch.save(self.grpo.state(), folder / "trainer.pt")

    def _keep_best(self, line: Mapping[str, Any]) -> None:
        """Keep the policy if it has the best validation. That of the model at the start does not count.

        Validations may have different numbers of questions, which are not equally hard: those that both judged decide.
        """
        name, best = validation_name(self.config.val_temperature), self.run.checkpoints.best()
        if not line["step"] or not (validation := line.get(name)) or not (scores := self._scores[name]):
            return
        if best is None or not _is_worse(scores, best["scores"]):
            figures = {**validation, "scores": scores}
            with self.run.checkpoints.write_best(line["step"], figures) as folder:
                self._save_policy(folder)

    def _save_policy(self, folder: Path) -> None:
        """Adapters are merged into the weights that are written."""
        with merged_weights(self.model) as weights:
            save_policy(self.model, self.tokenizer, folder, weights)


def _is_worse(scores: Mapping[str, float], best: Mapping[str, float]) -> bool:
    """Whether the mean of the questions that both judged is lower: of equal policies the one trained longer is kept."""
    return sum(score - best[task] for task, score in scores.items() if task in best) < -_ROUNDING
