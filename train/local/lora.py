"""LoRA (Hu et al. 2021, arXiv:2106.09685): the weights are frozen, and small adapters in the linear layers are trained.

The policy samples, and is saved, with merged weights ``W + (alpha / rank) B A``: a checkpoint is an ordinary model, and
the sampling engine knows nothing of adapters. All functions but :func:`add_adapters` take any model; they do nothing to
one without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from groundwire.train.config.errors import ConfigError

LORA_ALPHA = 16
"""Adapters are scaled by this number / their rank."""
_NAME = "default"  # peft's name of the adapters


def add_adapters(model: torch.nn.Module, *, rank: int, alpha: int, seed: int = 0) -> None:
    """Freeze the model and add adapters to all linear layers of its decoder. They change nothing before training.

    Raises :class:`ConfigError` if peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"lora_rank is {rank}, which needs the package peft ({error}): pip install 'groundwire[lora]'"
        ) from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
        inject_adapter_in_model(config, model, adapter_name=_NAME)


def adapters(model: torch.nn.Module) -> dict[str, Tensor]:
    """The adapters' parameters by name, in the order of the model's parameters."""
    return {name: value.detach() for name, value in model.named_parameters() if ".lora_" in name}


def check_rank(state: Mapping[str, Any], rank: int) -> None:
    """Raise :class:`ConfigError` if a trainer's state has adapters of another rank, or none and ``rank`` is not 0."""
    saved = next((len(value) for name, value in state.get("adapters", {}).items() if ".lora_A." in name), 0)
    if saved != rank:
        raise ConfigError(f"lora_rank is {rank}, but the checkpoint was trained with {saved}: resume with that")


@contextmanager
def merged_weights(model: torch.nn.Module) -> Iterator[dict[str, Tensor] | None]:
    """Inside, the model's weights contain the adapters; afterwards they are exactly what they were.

    Yields the weights under the names of the model without adapters; None if it has none.
    """
    frozen = []
    try:
        for layer in _adapted_layers(model):
            weight = layer.get_base_layer().weight
            frozen.append((weight, weight.data))
            weight.data = weight.data + layer.get_delta_weight(_NAME).to(weight.dtype)
        named = model.state_dict() if frozen else {}
        plain = {name.replace(".base_layer.", "."): value for name, value in named.items() if ".lora_" not in name}
        yield plain or None
    finally:
        for weight, data in frozen:
            weight.data = data


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model computes as it did before it had adapters."""
    layers = _adapted_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _adapted_layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "get_delta_weight")]
