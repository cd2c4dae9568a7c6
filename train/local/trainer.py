"""The training loop on one machine: sample, score, update, write down, again.

Each step leaves the run directory complete before the next begins, so that a kill loses at most the steps since the
last checkpoint. A run that is stopped, or that fails, writes one of its last whole step first: unless it is stopped
once more while it does, it loses at most the step that it was in.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from groundwire.adapters.tracing import calls_of_agents, trajectories, triplets
from groundwire.domains import Domain, Task, TaskData
from groundwire.tools.step_timer import StepTimer
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.summary import summarize
from groundwire.train.artifacts.tracking import Tracking
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.diagnosis import is_transient, nothing_judged, nothing_to_train
from groundwire.train.evaluation.validation import (
    accuracy,
    choose_tasks,
    validation_jobs,
    validation_missing,
    validation_name,
    validation_temperatures,
)
from groundwire.train.local.graceful_shutdown import GracefulShutdown
from groundwire.train.local.grpo import GRPO, GRPOConfig, ScoredRollout
from groundwire.train.policy.checkpoint import load_initial_state
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import fitting_length, save_policy
from groundwire.train.rollouts.collector import RolloutRequest, RolloutResult
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.factory import make_backend, make_reward
from groundwire.train.rollouts.rows import row
from groundwire.train.rollouts.runtime import RolloutRuntime

__all__ = ["LocalTrainer", "Watcher"]

_FULL_BYTES = 8 << 20  # less than this is left: a write that failed failed for that

_PATIENCE = 3  # steps in a row that may collect nothing, once one has collected something


class Watcher(Protocol):
    """What the trainer tells its display."""

    def phase(self, text: str, total: int) -> None:
        """A batch of ``total`` rollouts begins."""

    def tick(self) -> None:
        """One of them ended."""

    def step(self, line: dict[str, Any]) -> None:
        """A line of ``metrics.jsonl`` was written."""


class LocalTrainer:
    """One run: everything that is built once, and the loop over steps.

    ``stopping`` is the program's, where its signals are taken.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        data: TaskData,
        domain: Domain,
        run: RunDir,
        watcher: Watcher,
        stopping: GracefulShutdown | None = None,
    ) -> None:
        self.config, self.data, self.domain, self.run, self.watcher = config, data, domain, run, watcher
        self.stopping = stopping or GracefulShutdown()
        self.started = time.monotonic()
        self.threads = torch.get_num_threads()
        self.timer = StepTimer()
        self._barren = _PATIENCE - 1  # a run that never collected anything is not waited for
        start = load_initial_state(config, run)
        if start.note:
            print(f"note: {start.note}", file=sys.stderr)
        self.first_step = run.rewind()
        self._step_of_model: int | None = self.first_step  # None: in the middle of an update
        self._line: dict[str, Any] | None = None  # of that step, where it still lacks its validation
        self.model, self.tokenizer = start.model, start.tokenizer
        self.grpo = GRPO(
            self.model,
            GRPOConfig(
                learning_rate=config.learning_rate,
                minibatches=config.minibatches,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                temperature=config.temperature,
            ),
            seed=config.seed,
        )
        if start.state is not None:
            self.grpo.load_state(start.state)
        # A run that is resumed gets its earlier wall time back from its last line.
        self.earlier_s = next((line["wall_time_s"] for line in reversed(run.metrics()) if "wall_time_s" in line), 0.0)
        backend = make_backend(config)
        self.engine = LocalEngine(
            self.model,
            self.tokenizer,
            max_model_len=fitting_length(self.model, config.max_model_len),
            max_batch=128,
            timer=self.timer,
        )
        self.engine.update_weights(self.first_step)
        self.stack = RolloutRuntime(
            engine=self.engine,
            backend=backend,
            domain=domain,
            reward=make_reward(config, domain),
            timer=self.timer,
            run=run,
            config=config,
        )

    def train(self) -> dict[str, Any]:
        """Run the remaining steps; returns the run's summary."""
        config = self.config
        with (
            self.stack,
            Tracking(config, self.run, first_step=self.first_step) as self.tracking,
            self._kept(),
        ):
            lines = self.run.metrics()
            if not any(line["step"] == 0 for line in lines):
                self._log({"step": 0, **self._validation(0)})
            elif validation_missing(config, lines[-1]):
                self._amend(lines[-1])
            for step in range(self.first_step + 1, config.steps + 1):
                self._step(step)
        return summarize(self.run, config, self.data.source)

    def dev(self, count: int = 10) -> list[RolloutResult]:
        """No training: ``count`` tasks, their outcomes with every call."""
        tasks = choose_tasks(self.data.validation, count)
        sampling = {"temperature": self.config.val_temperature, "max_tokens": self.config.max_tokens}
        with self.stack:
            self.watcher.phase("tasks", len(tasks))
            jobs = [RolloutRequest(task=task, group=str(task["id"]), mode="val", sampling=sampling) for task in tasks]
            return self.stack.run(jobs, deadline_s=self.config.step_deadline_s, on_end=self.watcher.tick)

    def _step(self, step: int) -> None:
        config = self.config
        self.timer.split()
        before = self.engine.generated_tokens
        self.watcher.phase(f"step {step}", config.tasks_per_step * config.group_size)
        outcomes = self.stack.run(self._jobs(step), deadline_s=config.step_deadline_s, on_end=self.watcher.tick)
        generated = self.engine.generated_tokens - before
        rows = [row(step, o) for o in outcomes]
        self.run.write_rollouts(step, rows)
        self._check_trainable(rows)
        with self.stopping.whole(f"the update of step {step}"):
            self._step_of_model = None
            self._line = self._update(step, outcomes, generated)
            self._step_of_model = step
        line = self._line | self._validation(step)
        with self.stopping.whole(f"writing step {step}"):
            self._step_of_model = None  # a step without its line is none
            self._log(line)
            self._step_of_model, self._line = step, None
            if step == config.steps or step % config.checkpoint_every == 0:
                self._checkpoint(step)

    def _update(self, step: int, outcomes: Sequence[RolloutResult], generated: int) -> dict[str, Any]:
        """Learn from the step's rollouts; returns the step's line but for its validation."""
        config = self.config
        with self.timer.busy("update"):
            torch.set_num_threads(self.threads)  # the engine samples with fewer, and MKL's count is the process's
            rollouts = [
                ScoredRollout(
                    group=o.job.group,
                    reward=o.reward,
                    trajectories=trajectories(triplets(calls_of_agents(o.calls, config.agent_match), o.reward)),
                )
                for o in outcomes
                if o.reward is not None
            ]
            metrics = self.grpo.update(rollouts)
            self.engine.update_weights(step)
        scored = [o.reward for o in outcomes if o.reward is not None]
        line: dict[str, Any] = {
            "step": step,
            "reward": round(sum(scored) / len(scored), 4) if scored else None,
            **(
                {"reward_components": components}
                if (components := _means([o.reward_components for o in outcomes if o.succeeded]))
                else {}
            ),
            "rollouts": len(outcomes),
            "failures": dict(Counter(o.status for o in outcomes if not o.succeeded)),
            "retried": sum(o.attempts > 1 for o in outcomes),
            "calls": sum(len(o.calls) for o in outcomes),
            "tokens_generated": generated,
            **{name: round(value, 6) for name, value in metrics.items()},
        }
        seconds = self.timer.split()
        line["tokens_per_s"] = round(generated / max(1e-9, sum(seconds.values())), 1)
        line["seconds"] = {part: round(value, 4) for part, value in seconds.items()}
        return line

    def _jobs(self, step: int) -> list[RolloutRequest]:
        config = self.config
        jobs = []
        for task in self._tasks(step):
            for sample in range(config.group_size):
                key = f"{config.seed}/{step}/{task['id']}/{sample}".encode()
                seed = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big")
                sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens, "seed": seed}
                jobs.append(RolloutRequest(task=task, group=str(task["id"]), mode="train", sampling=sampling))
        return jobs

    def _tasks(self, step: int) -> list[Task]:
        """The step's tasks: shuffled epochs laid end to end, the same for a run that was resumed."""
        tasks, size = self.data.train, min(self.config.tasks_per_step, len(self.data.train))
        per_epoch = len(tasks) // size
        epoch, position = divmod(step - 1, per_epoch)
        order = list(range(len(tasks)))
        random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        return [tasks[i] for i in order[position * size : (position + 1) * size]]

    def _validation(self, step: int) -> dict[str, Any]:
        """What of a step's line is its validation."""
        config = self.config
        tasks = choose_tasks(
            self.data.validation, config.val_tasks if step in (0, config.steps) else config.val_every_tasks
        )
        results: dict[str, Any] = {}
        for temperature in validation_temperatures(config, step):
            self.watcher.phase(f"validation at temperature {temperature:g}", len(tasks))
            jobs = validation_jobs(tasks, temperature=temperature, max_tokens=config.max_tokens, seed=config.seed)
            deadline_s = config.step_deadline_s * max(1.0, len(jobs) / max(1, config.n_runners))
            outcomes = self.stack.run(jobs, deadline_s=deadline_s, on_end=self.watcher.tick)
            rows = [row(step, o) for o in outcomes]
            self.run.write_rollouts(step, rows, kind=f"val-{temperature:g}")
            if step == 0 and (why := nothing_judged(rows) or nothing_to_train(rows)):
                raise RolloutsFailedError(why)
            self._check_judged(rows)
            results[validation_name(temperature)] = accuracy(outcomes)
        return results

    def _check_trainable(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise :class:`RolloutsFailedError` where training on such rollouts would only take time."""
        self._check_judged(rows)
        why = nothing_judged(rows) or nothing_to_train(rows, agent_match=self.config.agent_match)
        self._barren = self._barren + 1 if why else 0
        if self._barren >= _PATIENCE:
            raise RolloutsFailedError(why)

    def _check_judged(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise where no rollout could be judged, and none could in the next step."""
        if (why := nothing_judged(rows)) and not is_transient(rows):
            raise RolloutsFailedError(why)

    def _log(self, line: dict[str, Any]) -> None:
        line["wall_time_s"] = self._wall_s()
        self.run.append_metrics(line)
        self.tracking.step(line)
        self.watcher.step(line)

    def _wall_s(self) -> float:
        return round(self.earlier_s + time.monotonic() - self.started, 2)

    def _amend(self, line: Mapping[str, Any]) -> None:
        whole = {**line, **self._validation(line["step"]), "wall_time_s": self._wall_s()}
        self.run.replace_last_metrics(whole)
        self.tracking.step(whole)
        self.watcher.step(whole)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Whatever ends the run early, ``--resume`` finds the last whole step."""
        try:
            yield
        except BaseException:
            step, line = self._step_of_model, self._line
            saved = self.run.checkpoints.paths()
            if step and not self.stopping.at_once and (not saved or saved[-1].name != f"step-{step:05d}"):
                # What ended the run is what is told of: a disk without room has the checkpoint before.
                with suppress(OSError), self.stopping.whole("writing a checkpoint"):
                    if line is not None:
                        self._log(line)
                    self._checkpoint(step)
            raise

    def _checkpoint(self, step: int) -> None:
        with self.run.checkpoints.write(step) as folder:
            try:
                save_policy(self.model, self.tokenizer, folder)
                torch.save(self.grpo.state(), folder / "trainer.pt")
            except Exception as error:
                # torch and safetensors say "disk full" each in words of their own.
                if shutil.disk_usage(folder).free < _FULL_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run.path)) from error
                raise


def _means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part of a reward, over the rollouts that have it."""
    values: dict[str, list[float]] = {}
    for each in parts:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: round(sum(found) / len(found), 4) for name, found in values.items()}
