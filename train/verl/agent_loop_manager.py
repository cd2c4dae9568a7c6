"""The agent loop manager for verl's V1 trainer (``actor_rollout_ref.rollout.agent.agent_loop_manager_class``).

verl creates one in its trainer's process, calls :meth:`RolloutManager.generate_sequences` with prompts, and takes
finished groups from TransferQueue (``verl/trainer/main_ppo.py``, ``verl/trainer/ppo/v1/``). Here the prompts become
rollouts, which the same agents, proxy and rewards as on a laptop run. :mod:`.patches` lists what changes in verl's
trainer.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from groundwire.tools.startup import freeze_objects, silence_libraries
from groundwire.train.algorithms.distillation import Teacher
from groundwire.train.algorithms.losses import OldLogprobs
from groundwire.train.algorithms.speed import ModelCost
from groundwire.train.algorithms.task_schedule import TaskSchedule
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.verl_names import MINIBATCH, OWN_ESTIMATOR
from groundwire.train.step_timer import StepTimer
from groundwire.train.verl.hydra_config import chooses_old_logprobs, has_own_engine
from groundwire.train.verl.metrics import last_probability_difference
from groundwire.train.verl.patches import patch_trainer
from groundwire.train.verl.rollout_service import Prompt, RolloutService
from groundwire.train.verl.rollout_workers import RolloutWorkers, WorkerProcesses, load_tokenizer, run_config
from groundwire.train.verl.rows import TransferQueueRows


class RolloutManager:
    """verl calls :meth:`create` once, then :meth:`generate_sequences` for every batch of prompts."""

    current: ClassVar[RolloutManager]
    """The manager of this process. verl creates its sampler without a reference to it."""
    processes: ClassVar[WorkerProcesses | None] = None
    """For the next manager. verl's sampler starts them, some minutes before verl creates the manager."""

    def __init__(self, config: Any, workers: RolloutWorkers, row_writers: Sequence[Any]) -> None:
        import pyarrow.parquet as pq

        self.config, self._verl = run_config(config), config
        self.run = RunDir.open(config.groundwire.run_dir)
        rollout = config.actor_rollout_ref.rollout
        self._group_sizes = {"train": rollout.n, "val": rollout.val_kwargs.n}
        self._old_logprobs = OldLogprobs() if chooses_old_logprobs(self.config, config) else None
        self.timer, self.workers = VerlStepTimer(), workers
        # Those that were written for verl's data set.
        tasks = pq.read_table(self.run.path / "tasks" / "train.parquet", columns=["task"])["task"].to_pylist()
        tokenizer = load_tokenizer(config)
        self.service = RolloutService(
            runtime=workers,
            queue=TransferQueueRows(row_writers, self.config.domain),
            config=self.config,
            run=self.run,
            pad_id=int(tokenizer.eos_token_id or 0),
            own_advantages=config.algorithm.adv_estimator == OWN_ESTIMATOR,
            schedule=TaskSchedule(list(map(json.loads, tasks)), self.config),
            teacher=Teacher(self.config, tokenizer) if self.config.teacher else None,
        )
        path, adapters = config.actor_rollout_ref.model.path, self.config.lora_rank > 0
        self.service.metrics.cost = ModelCost.without_weights(path, frozen=adapters)

    @classmethod
    def create(
        cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> RolloutManager:
        """Called by verl: ``config`` is its whole configuration, ``llm_client`` reaches its inference servers.

        verl's reward workers are not used: rollouts already have rewards. Raises ``ValueError`` for a teacher.
        """
        if teacher_client is not None:
            raise ValueError("distillation.enabled is set, which cannot distill agents' rollouts: use teacher")
        silence_libraries()
        own_engine = has_own_engine(config)
        attention = config.actor_rollout_ref.model.override_config.get("attn_implementation")
        patch_trainer(own_engine=own_engine, shared_prefixes=own_engine and attention == "groundwire_varlen")
        number = config.actor_rollout_ref.rollout.agent.num_workers
        processes, cls.processes = cls.processes or WorkerProcesses(number), None

        def start(worker: int) -> tuple[Any, Any]:
            actor = processes.rollout_worker()
            return actor, actor.start.remote(config, llm_client, worker, number)

        workers = RolloutWorkers(start, number, retries=run_config(config).retries)
        RolloutManager.current = cls(config, workers, processes.row_writers)
        freeze_objects()
        return RolloutManager.current

    def generate_sequences(self, prompts: Any) -> None:
        """Enqueue rollouts for ``prompts`` (a TensorDict of verl's data set) and return."""
        self.service.submit(prompts_from_batch(prompts, self._group_sizes))

    def start_sampling(self) -> None:
        """verl's trainer starts to wait for rollouts."""
        self.timer.start_sampling()
        self.workers.seconds()  # those before do not count

    def sampled(self, partition: str, step: int, rows: int) -> dict[str, float]:
        """verl's trainer has received its rollouts as ``rows`` rows. Returns metrics of the rollouts that ended."""
        chosen: dict[str, float] = {}
        if training := partition == "train":
            self._set_minibatches(rows)
            if self._old_logprobs is not None:
                chosen = choose_old_logprobs(self._old_logprobs, self._verl, self.run, step)
        try:
            seconds = self.timer.end_sampling(self.workers.seconds(), training=training)
            return self.service.finish_sampling(partition, step, seconds) | chosen
        finally:
            self.timer.enter("update")  # verl's trainer continues with the rollouts

    def stop(self) -> None:
        """End the rollout processes' parts, and wait until all rollouts are written."""
        try:
            self.workers.stop()
        finally:
            self.service.metrics.finish_writing()

    def _set_minibatches(self, rows: int) -> None:
        """Divide the step's rows into ``minibatches`` updates.

        verl fixes the size of a mini-batch before it knows how many rows the rollouts have, and fills the last one with
        padding: a few rows in it would weigh as much as all rows of another. It reads the size, in prompts, from its
        configuration in every step. In ``separate_async`` each sample is one update.
        """
        if any(key.lstrip("+") == MINIBATCH for key in self.config.verl):
            return
        trainer, n = self._verl.trainer, self._group_sizes["train"]
        updates = 1 if trainer.v1.trainer_mode == "separate_async" else self.config.minibatches
        prompts = minibatch_prompts(rows, updates, group_size=n, devices=trainer.nnodes * trainer.n_gpus_per_node)
        for section in (self._verl.actor_rollout_ref.actor, self._verl.critic):
            section.ppo_mini_batch_size = prompts


def choose_old_logprobs(rule: OldLogprobs, verl: Any, run: RunDir, step: int) -> dict[str, float]:
    """Set for ``step``, whose rollouts are complete, what verl's trainer reads in every step; returns a metric.

    verl has logged the step before. With ``bypass_mode`` it takes the sampler's log-probabilities as the old ones.
    """
    computes = rule.computes(step, last_probability_difference(run))
    verl.algorithm.rollout_correction.bypass_mode = not computes
    return {"rollouts/old_logprobs_recomputed": float(computes)}


def minibatch_prompts(rows: int, updates: int, *, group_size: int, devices: int) -> int:
    """The size of a mini-batch in prompts of ``group_size`` rows with which ``rows`` rows are ``updates`` updates.

    Devices share a mini-batch equally. With fewer rows than that takes there are fewer updates.
    """
    unit = math.lcm(group_size, devices)
    return max(1, math.ceil(rows / updates / unit)) * unit // group_size


class VerlStepTimer(StepTimer):
    """Adds the update before a training sampling to that sampling's seconds.

    verl's trainer calls us only to sample, so the time between two samplings counts as update. A validation in between
    reports only its own seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._update = Counter[str]()

    def start_sampling(self) -> None:
        """The trainer starts to wait for rollouts."""
        seconds = self.split()
        if self._busy["update"]:  # the time before the first sampling was startup
            self.leave("update")
            self._update.update(seconds)

    def end_sampling(self, worked: Mapping[str, float], *, training: bool) -> dict[str, float]:
        """The rollouts are complete. Returns each phase's seconds; a training's include those of the last update.

        ``worked`` are the workers' seconds since :meth:`start_sampling`; ``waiting`` is what they leave of the time.
        Until ``update`` is entered the rollouts are written to disk, which does not count as it.
        """
        seconds, update = self.split(), self._update
        for phase in worked.keys() - {"update", "waiting"}:
            seconds[phase] += worked[phase]
            seconds["waiting"] -= worked[phase]
        if training:
            self._update = Counter()
            return {phase: value + update[phase] for phase, value in seconds.items()}
        return seconds


def prompts_from_batch(batch: Any, group_sizes: dict[str, int]) -> list[Prompt]:
    """The rows of a batch from verl. ``group_sizes``: rollouts per prompt in the partitions ``train`` and ``val``."""
    names, count = set(batch.keys()), len(batch)
    partition = "val" if "validate" in names and _column(batch, "validate", 1)[0] else "train"
    sizes = _column(batch, "__rollout_n__", count) if "__rollout_n__" in names else [group_sizes[partition]] * count
    columns = (_column(batch, name, count) for name in ("uid", "task", "global_steps"))
    return [
        Prompt(uid=str(uid), task=json.loads(task), rollouts=int(size), step=int(step), partition=partition)
        for uid, task, step, size in zip(*columns, sizes, strict=True)
    ]


def _column(batch: Any, name: str, count: int) -> list[Any]:
    """A column's values. TensorDict stores a column as a tensor, a stack of values, or one value for all rows."""
    value = batch[name]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [getattr(entry, "data", entry) for entry in value]
    return [getattr(value, "data", value)] * count
