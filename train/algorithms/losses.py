"""The terms of the loss over sampled tokens, as pure functions: clipped policy loss, KL to a reference, aggregation.

The policy loss is PPO's clipped objective with a higher upper bound (Yu et al. 2025, "DAPO", arXiv:2503.14476,
"clip-higher") and the dual clip of Ye et al. 2020 (arXiv:1912.09729) for negative advantages. How the tokens' losses
become one number is the choice of :data:`Loss`. With ``T_i`` trained tokens in sequence ``i`` of ``S`` sequences, and
``l_it`` the loss of a token:

============== ========================================= =====================================================
loss           value                                     source
============== ========================================= =====================================================
token-mean     sum(l_it) / sum(T_i)                      DAPO, section 3.3
sequence-mean  sum(sum(l_it) / T_i) / S                  Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300
dr-grpo        sum(l_it) / (S * max_tokens)              Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783
gspo           sequence-mean with one ratio per sequence Zheng et al. 2025, "GSPO", arXiv:2507.18071
============== ========================================= =====================================================

On the same tensors these equal verl 0.9's ``compute_policy_loss_vanilla``, ``compute_policy_loss_gspo``, ``agg_loss``
and ``kl_penalty`` with ``low_var_kl`` (``verl/trainer/ppo/core_algos.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Loss = Literal["token-mean", "sequence-mean", "dr-grpo", "gspo"]
Schedule = Literal["constant", "linear", "cosine"]

_MAX_LOG_RATIO = 20.0
_CLIP_LOW, _CLIP_DUAL = 0.2, 3.0  # the loss of a token is at most the second times its negative advantage
_MAX_DIFFERENCE = 0.004
"""Mean absolute difference of the sampled tokens' probabilities. vLLM and the actor differ by 0.001 to 0.002 with the
same weights in bfloat16, which rounds by up to 2**-8 = 0.004 of a value: a larger mean is more than rounding."""
_STEPS_PER_MEASUREMENT = 20  # the measurement then costs a twentieth of what leaving the pass out gains


def token_weights(lengths: Sequence[int], loss: Loss, *, max_tokens: int) -> list[float]:
    """The weight of each trained token of a sequence in the loss, one number per sequence.

    ``lengths``: the trained tokens of each sequence of a minibatch. Sequences without any do not count. ``max_tokens``
    is the constant divisor of ``dr-grpo``.
    """
    sequences = sum(length > 0 for length in lengths)
    if loss == "token-mean":
        return [1 / max(1, sum(lengths))] * len(lengths)
    if loss == "dr-grpo":
        return [1 / max(1, sequences * max_tokens)] * len(lengths)
    return [1 / (sequences * length) if length else 0.0 for length in lengths]


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    sequences: Tensor | None = None,
    clip_high: float = 0.3,
) -> tuple[Tensor, dict[str, float]]:
    """The sum of the trained tokens' clipped losses times ``weights``. All tensors are [M], of M > 0 tokens.

    ``sequences`` (int64) numbers each token's sequence: with it, every token has the ratio of its sequence, the
    geometric mean of its tokens' ratios (GSPO), and the gradient of its own log-probability. The dual clip is not used
    then, as in verl.

    Returns the scalar loss and the metrics ``clip_fraction``, ``kl`` (the estimate ``mean(old - new)``), ``ratio_max``
    and ``ratio_min``.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if sequences is None:
        ratio = log_ratio.exp()
    else:
        lengths = sequences.bincount()
        sums = log_ratio.new_zeros(len(lengths)).index_add(0, sequences, log_ratio.detach())
        ratio = ((sums / lengths)[sequences] + logprobs - logprobs.detach()).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - _CLIP_LOW, 1 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    if sequences is None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * _CLIP_DUAL), losses)
    with torch.no_grad():
        metrics = {
            "clip_fraction": float((clipped > unclipped).to(ratio.dtype).mean()),
            "kl": float(-log_ratio.mean()),
            "ratio_max": float(ratio.max()),
            "ratio_min": float(ratio.min()),
        }
    return (losses * weights).sum(), metrics


def kl_to_reference(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The KL divergence to the reference policy at each token, estimated as ``exp(d) - d - 1`` with
    ``d = reference - logprobs`` ("k3" of Schulman 2020, "Approximating KL divergence"); at least 0, at most 10.

    The cut keeps the gradient, or the tokens that are furthest from the reference would not be pulled back. It is that
    of the formula, beyond ``d = 20`` the one at 20. verl cuts the gradient, too.
    """
    difference = reference - logprobs
    near = difference.clamp(max=_MAX_LOG_RATIO)
    divergence = near.exp() * (1 + difference - near) - difference - 1
    return divergence.detach().clamp(max=10.0) + (divergence - divergence.detach())


def learning_rate(step: int, *, base: float, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of a training step, counted from 0.

    It rises linearly to ``base`` within ``warmup_steps``. Then it stays there, or falls to 0 at ``total_steps``,
    linearly or along half a cosine.
    """
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant":
        return base
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return base * (1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)


class OldLogprobs:
    """In which steps of a run the old log-probabilities are computed, where the sampler has other ones.

    The policy loss compares the policy with the one before the update. The log-probabilities of that one are computed
    in a forward pass of their own, or they are the sampler's, which differ from the trainer's by rounding. The pass
    also measures how far the two differ, so it is left out while the last measurement was small. This changes what is
    optimised from step to step, by as little as the sampler errs. A process begins with a step that measures.
    """

    def __init__(self) -> None:
        self._computed, self._next_measurement = False, 0

    def computes(self, step: int, difference: float | None) -> bool:
        """Whether the pass runs in ``step``; ``difference`` is what the step before measured, if it did."""
        if self._computed and difference is not None and difference <= _MAX_DIFFERENCE:
            self._next_measurement = step - 1 + _STEPS_PER_MEASUREMENT
        self._computed = step >= self._next_measurement
        return self._computed
