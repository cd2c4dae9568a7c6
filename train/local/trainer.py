"""The training loop on one machine: sample, score, update, write down, again.

Each step leaves the run directory complete before the next begins, so that a kill loses at most the step it hit.
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
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from adapters.tracing import select, trajectories
from domains import Domain, Task, TaskData
from train.backends import make_backend, make_reward
from train.clock import StepClock
from train.config import ConfigError, RunConfig
from train.diagnosis import nothing_to_train
from train.local.engine import Engine
from train.local.grpo import GRPO, GRPOConfig, Rollout
from train.local.model import save_policy
from train.local.stack import LocalStack
from train.local.start import STARTER, load_start
from train.rollouts import Job, Outcome
from train.rows import row
from train.rundir import RunDir
from train.summary import summarize
from train.tracking import Tracking
from train.validation import accuracy, choose_tasks, validation_jobs

__all__ = ["STARTER", "LocalTrainer", "Watcher"]

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
    """One run: everything that is built once, and the loop over steps."""

    def __init__(self, config: RunConfig, *, data: TaskData, domain: Domain, run: RunDir, watcher: Watcher) -> None:
        self.config, self.data, self.domain, self.run, self.watcher = config, data, domain, run, watcher
        self.started = time.monotonic()
        self.threads = torch.get_num_threads()
        self.clock = StepClock()
        self._barren = _PATIENCE - 1  # a run that never collected anything is not waited for
        start = load_start(config, run)
        if start.note:
            print(f"note: {start.note}", file=sys.stderr)
        self.first_step = run.rewind()
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
        self.earlier_s = next((line["wall_s"] for line in reversed(run.metrics()) if "wall_s" in line), 0.0)
        backend = make_backend(config)
        self.engine = Engine(
            self.model, self.tokenizer, max_model_len=config.max_model_len, max_batch=128, clock=self.clock
        )
        self.engine.update_weights(self.first_step)
        self.stack = LocalStack(
            engine=self.engine,
            backend=backend,
            domain=domain,
            reward=make_reward(config, domain),
            clock=self.clock,
            run=run,
            config=config,
        )

    def train(self) -> dict[str, Any]:
        """Run the remaining steps; returns the run's summary."""
        config = self.config
        with Tracking(config, self.run, first_step=self.first_step) as self.tracking, self.stack:
            if not any(line["step"] == 0 for line in self.run.metrics()):
                self._log({"step": 0, **self._validate(0, config.val_tasks, sampled=True)})
            for step in range(self.first_step + 1, config.steps + 1):
                self._step(step)
        return summarize(self.run, config, self.data.source)

    def dev(self, count: int = 10) -> list[Outcome]:
        """No training: ``count`` tasks, their outcomes with every call."""
        tasks = choose_tasks(self.data.validation, count)
        sampling = {"temperature": self.config.val_temperature, "max_tokens": self.config.max_tokens}
        with self.stack:
            self.watcher.phase("tasks", len(tasks))
            jobs = [Job(task=task, group=str(task["id"]), mode="val", sampling=sampling) for task in tasks]
            return self.stack.run(jobs, deadline_s=self.config.step_deadline_s, on_end=self.watcher.tick)

    def _step(self, step: int) -> None:
        config = self.config
        self.clock.lap()
        before = self.engine.stats()
        self.watcher.phase(f"step {step}", config.tasks_per_step * config.group_size)
        outcomes = self.stack.run(self._jobs(step), deadline_s=config.step_deadline_s, on_end=self.watcher.tick)
        after = self.engine.stats()
        with self.clock.busy("update"):
            torch.set_num_threads(self.threads)  # the engine samples with fewer, and MKL's count is the process's
            rollouts = [
                Rollout(
                    group=o.job.group, reward=o.reward, trajectories=trajectories(select(o.calls, config.agent_match))
                )
                for o in outcomes
                if o.reward is not None
            ]
            metrics = self.grpo.update(rollouts)
            self.engine.update_weights(step)
        last = step == config.steps
        scored = [o.reward for o in outcomes if o.reward is not None]
        generated = after.generated_tokens - before.generated_tokens
        line: dict[str, Any] = {
            "step": step,
            "reward": round(sum(scored) / len(scored), 4) if scored else None,
            **({"parts": parts} if (parts := _means([o.parts for o in outcomes if o.succeeded])) else {}),
            "rollouts": len(outcomes),
            "failures": dict(Counter(o.status for o in outcomes if not o.succeeded)),
            "retried": sum(o.attempts > 1 for o in outcomes),
            "calls": sum(len(o.calls) for o in outcomes),
            "tokens_generated": generated,
            **{name: round(value, 6) for name, value in metrics.items()},
        }
        seconds = self.clock.lap()
        line["tokens_per_s"] = round(generated / max(1e-9, sum(seconds.values())), 1)
        line["seconds"] = {part: round(value, 4) for part, value in seconds.items()}
        rows = [row(step, o) for o in outcomes]
        self.run.write_rollouts(step, rows)
        why = nothing_to_train(rows, agent_match=config.agent_match)
        self._barren = self._barren + 1 if why else 0
        if self._barren >= _PATIENCE:
            raise self._nothing(why)
        if last:
            line |= self._validate(step, config.val_tasks, sampled=True)
        elif config.val_every and step % config.val_every == 0:
            line |= self._validate(step, config.val_every_tasks, sampled=False)
        self._log(line)
        if last or step % config.checkpoint_every == 0:
            self._checkpoint(step)

    def _jobs(self, step: int) -> list[Job]:
        config = self.config
        jobs = []
        for task in self._tasks(step):
            for sample in range(config.group_size):
                key = f"{config.seed}/{step}/{task['id']}/{sample}".encode()
                seed = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big")
                sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens, "seed": seed}
                jobs.append(Job(task=task, group=str(task["id"]), mode="train", sampling=sampling))
        return jobs

    def _tasks(self, step: int) -> list[Task]:
        """The step's tasks: shuffled epochs laid end to end, the same for a run that was resumed."""
        tasks, size = self.data.train, min(self.config.tasks_per_step, len(self.data.train))
        per_epoch = len(tasks) // size
        epoch, position = divmod(step - 1, per_epoch)
        order = list(range(len(tasks)))
        random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        return [tasks[i] for i in order[position * size : (position + 1) * size]]

    def _validate(self, step: int, count: int, *, sampled: bool) -> dict[str, Any]:
        """Accuracy at ``val_temperature``, and at the training temperature where ``sampled``."""
        config, tasks = self.config, choose_tasks(self.data.validation, count)
        results: dict[str, Any] = {}
        temperatures = {"validation": config.val_temperature}
        if sampled:
            temperatures["validation_sampled"] = config.temperature
        for name, temperature in temperatures.items():
            self.watcher.phase(f"validation at temperature {temperature:g}", len(tasks))
            jobs = validation_jobs(tasks, temperature=temperature, max_tokens=config.max_tokens, seed=config.seed)
            deadline_s = config.step_deadline_s * max(1.0, len(jobs) / max(1, config.n_runners))
            outcomes = self.stack.run(jobs, deadline_s=deadline_s, on_end=self.watcher.tick)
            rows = [row(step, o) for o in outcomes]
            self.run.write_rollouts(step, rows, kind=f"val-{temperature:g}")
            if step == 0 and (why := nothing_to_train(rows)):
                raise self._nothing(why)
            results[name] = accuracy(outcomes)
        return results

    def _nothing(self, why: str) -> ConfigError:
        """More steps would only take time."""
        return ConfigError(f"{why}. More: python -m train.why {self.run.path}")

    def _log(self, line: dict[str, Any]) -> None:
        line["wall_s"] = round(self.earlier_s + time.monotonic() - self.started, 2)
        self.run.append_metrics(line)
        self.tracking.step(line)
        self.watcher.step(line)

    def _checkpoint(self, step: int) -> None:
        with self.run.new_checkpoint(step) as folder:
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
