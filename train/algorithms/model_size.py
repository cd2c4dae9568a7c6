"""What a model's size decides: its learning rates, and the memory of a run on GPUs.

Learning rates are power laws between rates that are known to work: the larger the model, the smaller the step.
Reinforcement learning with GRPO: 1e-6 for 7 B parameters (DeepSeekMath, Shao et al. 2024, arXiv:2402.03300), 1e-5 for
135 M and 2e-4 for 1.1 M (measured here). Supervised: 2e-5 for 7 B (Llama 2, Touvron et al. 2023, arXiv:2307.09288),
5e-4 for 135 M (measured here). LoRA's best rate is ten times that of full training (Schulman et al. 2025, "LoRA Without
Regret").

Memory is predicted before anything is allocated. Each trainer has a function from settings to a :class:`MemoryPlan`.
:func:`plan_memory` takes the longest pass that fits, or names the settings that would help. The factors of activations
are counted from a layer's operations or fitted to measurements, so they are estimates: docs/results.md compares
predictions with measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from groundwire.train.config.errors import ConfigError

_REFERENCE = 7e9


def rl_learning_rate(parameters: int, *, lora: bool = False) -> float:
    """``1e-6 (7e9 / parameters)^0.6``, at most 2e-4; ten times as much for LoRA adapters."""
    return _rounded(min(2e-4, 1e-6 * (_REFERENCE / parameters) ** 0.6) * (10 if lora else 1))


def sft_learning_rate(parameters: int) -> float:
    """``2e-5 (7e9 / parameters)^0.8``, at most 2e-3."""
    return _rounded(min(2e-3, 2e-5 * (_REFERENCE / parameters) ** 0.8))


def _rounded(rate: float) -> float:
    return float(f"{rate:.1e}")


WORKING = 1.5
"""A layer's activations and their gradients, relative to the activations."""
_USABLE = 0.9  # the part of a GPU's memory that is planned with; the rest is for fragments and the CUDA context
_OF_A_PASS = ("cache", "activations", "logits")  # the parts of an update that depend on the length of its passes

Settings = Mapping[str, Any]
Changes = Mapping[str, Settings]
"""Advice to the user, and the settings that it changes."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one GPU, and the tokens of a pass that they are for."""

    parts: Mapping[str, int]
    """Of an update, by purpose."""
    tokens: int
    available: int
    """The bytes of the GPU."""
    optimizer_step: int = 0
    """The peak while the optimizer computes its step, where it may be above that of a pass."""
    sampling: int = 0
    """While sampling, of a sampler that frees its memory during an update."""

    @property
    def update(self) -> int:
        """The predicted peak of an update in bytes."""
        return max(sum(self.parts.values()), self.optimizer_step)

    @property
    def states(self) -> int:
        """What an update needs however short its passes are."""
        return max(sum(size for name, size in self.parts.items() if name not in _OF_A_PASS), self.optimizer_step)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in self.parts.items())
        sampling = f", {self.sampling / 1e9:.1f} GB while sampling" if self.sampling else ""
        return (
            f"{self.update / 1e9:.1f} GB for an update ({parts}) with {self.tokens:,} tokens a pass{sampling}; "
            f"the GPU has {self.available / 1e9:.1f} GB"
        )


def plan_memory(
    plan: Callable[[Settings], MemoryPlan],
    settings: Settings,
    *,
    tokens: str,
    least: int | None,
    update: Changes,
    sampling: Changes | None = None,
) -> MemoryPlan:
    """The plan of a run, with the longest pass that fits.

    ``tokens`` is the name of the setting for the tokens of a pass; its value is halved, to ``least`` at most, until an
    update fits. It is kept if ``least`` is None. ``update`` and ``sampling`` are what may make them fit, in the order
    in which it is left out if not all is needed.

    Raises :class:`ConfigError` if not even the shortest pass fits, or sampling does not.
    """
    made = plan(settings)
    usable = _USABLE * made.available
    while least is not None and made.update > usable and settings[tokens] > least:
        settings = {**settings, tokens: max(least, settings[tokens] // 2)}
        made = plan(settings)
    if made.update > usable:
        states = f"; weights, gradients and moments alone need {made.states / 1e9:.1f} GB"
        advice = _helpful(update, lambda change: plan({**settings, **change}).update <= usable)
        raise ConfigError(f"the run needs {made}{states if made.states > usable else ''}: {advice}")
    if made.sampling > made.available:
        advice = _helpful(sampling or {}, lambda change: plan({**settings, **change}).sampling <= made.available)
        raise ConfigError(f"the run needs {made}: {advice}")
    return made


def _helpful(changes: Changes, fits: Callable[[Settings], bool]) -> str:
    """The ``changes`` that each make the run fit, else as few as do so together; and what helps in any case."""

    def fit_together(names: list[str]) -> bool:
        return fits({setting: value for name in names for setting, value in changes[name].items()})

    larger = "take a larger GPU or a smaller model"
    if alone := [name for name in changes if fit_together([name])]:
        return f"{' or '.join(alone)}, or {larger}"
    needed = list(changes)
    if not fit_together(needed):
        return larger
    for name in changes:
        if fit_together(rest := [other for other in needed if other != name]):
            needed = rest
    return f"{' and '.join(needed)}, or {larger}"


def empty_model(model: Any) -> Any:
    """The model in a folder in Hugging Face's format, of the hub, or of a configuration, without its weights: on the
    device ``meta``.

    Raises ``OSError`` or ``ValueError`` if its configuration cannot be read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = model
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)  # it would ask on the terminal
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config.get_text_config())


def count_adapters(model: Any, rank: int) -> int:
    """The parameters of LoRA adapters of this rank in all linear layers of the model's decoder."""
    import torch

    linear = (module for module in model.base_model.modules() if isinstance(module, torch.nn.Linear))
    return sum(rank * (layer.in_features + layer.out_features) for layer in linear)
