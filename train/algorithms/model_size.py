"""Learning rates that fit a model's size: the larger the model, the smaller the step.

Both are power laws between learning rates that are known to work. Reinforcement learning with GRPO: 1e-6 for 7 B
parameters (DeepSeekMath, Shao et al. 2024, arXiv:2402.03300), 1e-5 for 135 M and 2e-4 for 1.1 M (measured here).
Supervised: 2e-5 for 7 B (Llama 2, Touvron et al. 2023, arXiv:2307.09288), 5e-4 for 135 M (measured here). LoRA's best
learning rate is ten times that of full training (Schulman et al. 2025, "LoRA Without Regret").
"""

from __future__ import annotations

__all__ = ["rl_learning_rate", "sft_learning_rate"]

_REFERENCE = 7e9


def rl_learning_rate(parameters: int, *, lora: bool = False) -> float:
    """``1e-6 (7e9 / parameters)^0.6``, at most 2e-4; ten times as much for LoRA adapters."""
    return _rounded(min(2e-4, 1e-6 * (_REFERENCE / parameters) ** 0.6) * (10 if lora else 1))


def sft_learning_rate(parameters: int) -> float:
    """``2e-5 (7e9 / parameters)^0.8``, at most 2e-3."""
    return _rounded(min(2e-3, 2e-5 * (_REFERENCE / parameters) ** 0.8))


def _rounded(rate: float) -> float:
    return float(f"{rate:.1e}")
