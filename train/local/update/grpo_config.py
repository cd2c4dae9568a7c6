"""The hyperparameters of the local trainer's update."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from groundwire.train.algorithms.losses import Loss, Schedule
from groundwire.train.config.run_config import RunConfig

__all__ = ["GRPOConfig"]


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """The hyperparameters."""

    learning_rate: float = 2e-4
    """Adam's step size. A policy of 1 M parameters needs a hundred times that of a 1 B one."""
    lr_schedule: Schedule = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 within ``total_steps``."""
    warmup_steps: int = 5
    """Steps of linear warm-up, because Adam's second moments are noisy at first."""
    total_steps: int = 0
    """The length of a falling schedule."""
    weight_decay: float = 0.0
    """AdamW's: each step shrinks the weights by this part of the learning rate."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm."""
    loss: Loss = "token-mean"
    """How the tokens' losses become one number."""
    clip_low: float = 0.2
    """Below a ratio of ``1 - clip_low`` a token with a negative advantage has no gradient."""
    clip_high: float = 0.3
    """Above ``1 + clip_high`` one with a positive advantage has none. Larger than ``clip_low``, for rare tokens."""
    clip_dual: float = 3.0
    """A token's loss is at most this many times its negative advantage."""
    kl_coef: float = 0.0
    """Factor of the KL divergence to the reference policy in the loss."""
    entropy_coef: float = 0.0
    """Factor of the entropy that is subtracted from the loss."""
    max_tokens: int = 64
    """Tokens of one reply at most: the divisor of the loss ``dr-grpo``."""
    minibatches: int = 2
    """Optimizer steps per batch of rollouts; clipping has an effect from the second on."""
    temperature: float = 1.0
    """The rollouts' sampling temperature, at which new log-probabilities are computed, too."""
    branches_per_row: int = 8
    """Most trajectories packed after one shared prefix: attention is quadratic in the row's length."""
    tokens_per_forward: int = 2048
    """Most tokens of a forward and backward pass, but at least one trajectory's. On a CPU, small passes are faster."""
    logits_per_chunk: int = 1 << 26
    """Most logits that exist at once; if there are more, they are computed in chunks, twice."""
    bf16: bool = False
    """Matrix products in bfloat16; weights, optimizer and log-probabilities stay in float32."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass: a third more time for a fraction of the memory."""

    @classmethod
    def from_settings(cls, config: RunConfig) -> GRPOConfig:
        """The values of a run's settings."""
        cuda = config.device.startswith("cuda")
        values = {field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)}
        values = {name: value for name, value in values.items() if value is not None}
        if cuda:
            values.setdefault("branches_per_row", sys.maxsize)  # blocks of other branches are skipped there
        values["bf16"] = config.precision == "bf16" or (config.precision == "auto" and cuda)
        values["gradient_checkpointing"] = {"auto": cuda, "on": True, "off": False}[config.gradient_checkpointing]
        return cls(**{**values, "total_steps": config.steps})
