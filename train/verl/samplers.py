"""The classes of verl's that this project extends in the trainer's process: its samplers, and the actor itself.

verl loads a sampler by name (``trainer.v1.sampler.custom_sampler``) and logs the metrics that it returns, so figures of
dropped rollouts reach the same tracker as verl's own. verl's choice of samples is unchanged. verl creates its sampler
before the model and the inference servers, so this also starts the processes beside the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from groundwire.train.verl.agent_loop_manager import RolloutManager
from groundwire.train.verl.rollout_workers import WorkerProcesses


class _ReportingSampler:
    """Times each sampling, adds the rollout metrics, and stops the wait when rollouts can no longer succeed."""

    poll_s = 0.2  # verl lists all keys of TransferQueue at each poll
    own_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, *, sampler_kwargs: Mapping[str, Any], **options: Any) -> None:
        RolloutManager.processes = WorkerProcesses(sampler_kwargs["workers"])
        own = {**self.own_options, "poll_interval": 0.0, "sampler_kwargs": sampler_kwargs}
        super().__init__(**options, **own)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        manager = RolloutManager.current
        manager.start_sampling()
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        return batch, {**metrics, **manager.sampled(partition_id, global_steps, len(batch))}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> Any:
        service = RolloutManager.current.service
        service.check()
        service.wait(self.poll_s)
        return super()._wait_for_next_poll(partition_id, last_debug_time)  # type: ignore[misc]


class SyncSampler(_ReportingSampler, ReplayBuffer):
    """For ``sync``: whole batches; failed groups are replaced. The service reports both at once, so polls are rare."""

    poll_s, own_options = 1.0, {"gen_batch_size": 1, "sync_refill_failed_groups": True}


class AsyncSampler(_ReportingSampler, ReplayBufferAsync):
    """For ``colocate_async`` and ``separate_async``."""


class TaskRunner(TaskRunnerV1.__ray_actor_class__):
    """verl's actor, for ``run_ppo``. Before Ray kills the job's processes, it ends what the rollout processes run."""

    def run(self, config: Any) -> None:
        """Train until verl ends; the last rollouts are then written, and the copies of databases removed."""
        try:
            super().run(config)
        finally:
            if self.agent_loop_manager is not None:
                self.agent_loop_manager.stop()
