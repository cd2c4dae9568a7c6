"""Optimises the named prompts of an agent: rollouts of this project, the search of the ``gepa`` package.

GEPA (Agrawal et al., 2025) keeps every prompt that no other one beats on all tasks: the Pareto front. It takes one of
them, shows a few rollouts with it to a reflection model, and scores the prompts that this model writes. Both kinds of
rollouts are on training tasks; the validation before and after is the same as that of the other trainers.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gepa import GEPAResult, optimize

from groundwire.tools.secrets import mask_secrets
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.tracking import open_trackers
from groundwire.train.config.errors import ConfigError
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.evaluator import first_verdict, runtime_of
from groundwire.train.evaluation.metrics import compute_accuracy
from groundwire.train.evaluation.notes import RolloutNotes, mostly_unscored, nothing_judged
from groundwire.train.evaluation.validation import (
    choose_tasks,
    validation_deadline_s,
    validation_name,
    validation_requests,
)
from groundwire.train.gepa import PROMPTS
from groundwire.train.gepa.adapter import TEMPLATE, Journal, PromptAdapter, ReflectionModel
from groundwire.train.job.job import Job
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout

_PARETO_TASKS, _REFLECTION_TASKS = 40, 4  # training tasks: of an accepted prompt's score, and of one reflection


class PromptTrainer:
    """One run, which begins with the prompts of the agent and those of the settings.

    Raises :class:`ConfigError` if there is no prompt.
    """

    def __init__(self, job: Job, *, run: RunDir, callback: ProgressCallback) -> None:
        self._job, self.config, self.data, self.run, self.callback = job, job.config, job.data, run, callback
        self._seed = {**job.backend.default_prompts(job.view.answers.name), **job.config.prompts}
        if not self._seed:
            raise ConfigError(
                "the agent has no named prompts: give them with --prompts FILE, and read them in the agent from "
                "endpoint.prompts"
            )
        self._breakdowns, self._started = job.domain.breakdowns, time.monotonic()
        self._timer = StepTimer()
        self._runtime = runtime_of(job, run=run, timer=self._timer)
        self._counts, self._failures = Counter(rollouts=0, calls=0), Counter[str]()
        self._rollout_notes = RolloutNotes(callback.on_note, run=run.path)

    def train(self) -> dict[str, str]:
        """Optimise, or go on; returns the best prompts, which are in :data:`PROMPTS`, too."""
        config, run = self.config, self.run
        lines = run.metrics()
        with self._runtime, open_trackers(config, run, first_step=len(lines)) as self._log:
            if not lines:
                self._write({"step": 0, **self._validate(0, self._seed)})
            result = self._optimise()
            best = dict(result.candidates[result.best_idx])
            run.write_json(PROMPTS, best)
            run.write_json("gepa.json", _front(result))
            step = len(run.metrics())  # 1, or more if the run goes on with a larger budget
            line = {
                "step": step,
                "reward": round(float(result.val_aggregate_scores[result.best_idx]), 4),
                "candidates": len(result.candidates),
                **self._counts,
                "failures": dict(self._failures),
                "seconds": {phase: round(value, 4) for phase, value in self._timer.split().items()},
            }
            self._write({**line, **self._validate(step, best)})
        return best

    def _optimise(self) -> GEPAResult[str, int]:
        config, run = self.config, self.run
        pareto = choose_tasks(self.data.train, _PARETO_TASKS)
        chosen = {task["id"] for task in pareto}
        others = [task for task in self.data.train if task["id"] not in chosen] or pareto
        adapter: Any = PromptAdapter(config, collect=self._collect, journal=Journal(run.path / "rollouts.jsonl"))
        reflection = ReflectionModel(config, Journal(run.path / "reflections.jsonl"))
        with (run.path / "gepa.log").open("a", encoding="utf-8") as file:
            logger: Any = SimpleNamespace(log=lambda line: print(mask_secrets(str(line)), file=file, flush=True))
            result: GEPAResult[str, int] = optimize(
                seed_candidate=self._seed,
                trainset=others,
                valset=pareto,
                adapter=adapter,
                reflection_lm=reflection,
                reflection_prompt_template=TEMPLATE,
                reflection_minibatch_size=min(_REFLECTION_TASKS, len(others)),
                max_metric_calls=config.prompt_budget,
                seed=config.seed,
                stop_callbacks=lambda state: reflection.error is not None,
                logger=logger,
                track_best_outputs=False,
                raise_on_exception=True,
            )
        if reflection.error is not None:
            raise reflection.error
        return result

    def _collect(self, requests: list[Rollout]) -> list[Rollout]:
        results = self._run("prompts", requests)
        self._counts.update(rollouts=len(results), calls=sum(len(result.trainable_calls) for result in results))
        self._failures.update(result.outcome.status for result in results if not result.succeeded)
        self.run.write_rollouts(1, results, append=True)
        return results

    def _run(self, phase: str, requests: list[Rollout]) -> list[Rollout]:
        self.callback.on_phase_start(phase, len(requests))
        deadline_s = validation_deadline_s(self.config, len(requests))
        results = self._runtime.run(requests, deadline_s=deadline_s, on_end=self.callback.on_rollout_end)
        self._rollout_notes.show(results)
        return results

    def _validate(self, step: int, prompts: dict[str, str]) -> dict[str, Any]:
        config, temperature = self.config, self.config.val_temperature
        tasks = choose_tasks(self.data.validation, config.val_tasks)
        requests = validation_requests(tasks, config, temperature, step=step)
        results = self._run("validation", [replace(request, prompts=prompts) for request in requests])
        self.run.write_rollouts(step, results, kind=f"val-{temperature:g}")
        if reason := nothing_judged(results) or mostly_unscored(results):
            raise RolloutsFailedError(reason)
        if step == 0:
            found = first_verdict(self._job, self._runtime, results, ids=False)
            for note in found.notes:
                self.callback.on_note(note)
            if found.problems:
                raise RolloutsFailedError("; ".join(found.problems))
        return {validation_name(temperature): compute_accuracy(results, self._breakdowns)}

    def _write(self, line: dict[str, Any]) -> None:
        line["wall_time_s"] = round(time.monotonic() - self._started, 2)
        if lost := self._runtime.runners_lost():
            line["runners_lost"] = lost
        self.run.append_metrics(line)
        self._log(line)
        self.callback.on_step_end(line)


def _front(result: GEPAResult[str, int]) -> dict[str, Any]:
    """Every prompt that was accepted, with its score, its parents and the tasks on which none is better."""
    won = Counter(index for winners in result.per_val_instance_best_candidates.values() for index in winners)
    return {
        "best": result.best_idx,
        "rollouts": result.total_metric_calls,
        "candidates": [
            {
                "prompts": dict(candidate),
                "score": round(float(score), 4),
                "parents": [parent for parent in parents if parent is not None],
                "best_on_tasks": won[index],
            }
            for index, (candidate, score, parents) in enumerate(
                zip(result.candidates, result.val_aggregate_scores, result.parents, strict=True)
            )
        ],
    }
