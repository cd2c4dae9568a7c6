"""Decides in which steps verl's trainer computes the old log-probabilities in a forward pass of their own.

verl's loss compares the policy with the one before the update. verl recomputes that one's log-probabilities of the
sampled tokens, or, with ``algorithm.rollout_correction.bypass_mode``, takes the sampler's. It reads this setting in
every step. The pass also measures how far the two differ, so it is left out while the last measurement was small.
"""

from __future__ import annotations

from typing import Any

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig
from groundwire.train.verl.metrics import last_probability_difference

__all__ = ["OldLogprobs"]

_MAX_DIFFERENCE = 0.004
"""Mean absolute difference of the sampled tokens' probabilities. vLLM and the actor differ by 0.001 to 0.002 with the
same weights in bfloat16, which rounds by up to 2**-8 = 0.004 of a value: a larger mean is more than rounding."""
_STEPS_PER_MEASUREMENT = 20
"""The measurement then costs a twentieth of what leaving the pass out gains."""


class OldLogprobs:
    """Sets verl's ``bypass_mode`` for each step of a run; a process begins with a step that measures."""

    def __init__(self, verl: Any, run: RunDir) -> None:
        """``verl`` is the configuration that verl's trainer reads, and ``run`` has its log."""
        self._correction, self._run = verl.algorithm.rollout_correction, run
        self._recomputed, self._next_measurement = False, 0

    @classmethod
    def of(cls, config: RunConfig, verl: Any, run: RunDir) -> OldLogprobs | None:
        """None where the pass is the user's choice, or has another purpose.

        Asynchronous modes sample with earlier weights and correct for that, router replay records its routes in the
        pass, a KL term in the reward is measured from its result, and the losses other than PPO's clip at distances
        from a ratio of 1 that may be as small as the sampler's error (GSPO's 0.0003).
        """
        given = any("rollout_correction" in key or "router_replay" in key for key in config.verl)
        needed = (
            verl.trainer.v1.trainer_mode != "sync"
            or verl.algorithm.use_kl_in_reward
            or verl.actor_rollout_ref.actor.policy_loss.loss_mode != "vanilla"
        )
        return None if given or needed else cls(verl, run)

    def choose(self, step: int) -> dict[str, float]:
        """Choose for ``step``, whose rollouts are complete; verl has logged the step before. Returns a metric."""
        if self._recomputed:
            difference = last_probability_difference(self._run)
            if difference is not None and difference <= _MAX_DIFFERENCE:
                self._next_measurement = step - 1 + _STEPS_PER_MEASUREMENT
        self._recomputed = step >= self._next_measurement
        self._correction.bypass_mode = not self._recomputed
        return {"rollouts/old_logprobs_recomputed": float(self._recomputed)}
