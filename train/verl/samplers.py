"""verl's own samplers, asked five times a second instead of every other second, with our figures in their metrics.

verl lets a sampler be named (``trainer.v1.sampler.custom_sampler``) and logs what it returns, which is the one way in
which what was dropped gets into the same tracking as everything else. What is sampled is left to verl.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from groundwire.train.verl.agent_loop_manager import RolloutManager

__all__ = ["AsyncSampler", "SyncSampler"]

_POLL_S = 0.2


class _Told:
    """What both do around verl's own sampling: tell the manager, and ask it whether waiting is of any use."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        manager = RolloutManager.current
        manager.timer.sampling_begins()
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        return batch, {**metrics, **manager.sampled(partition_id, global_steps)}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> Any:
        RolloutManager.current.service.check()
        return super()._wait_for_next_poll(partition_id, last_debug_time)  # type: ignore[misc]


class SyncSampler(_Told, ReplayBuffer):
    """For ``sync``: whole batches, failed groups replaced."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, poll_interval=_POLL_S, gen_batch_size=1, sync_refill_failed_groups=True)


class AsyncSampler(_Told, ReplayBufferAsync):
    """For ``colocate_async`` and ``separate_async``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, poll_interval=_POLL_S)
