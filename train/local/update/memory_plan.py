"""The peak memory of a local run on a GPU, from the model's shape and the settings, before anything is allocated.

The sampler's keys and values stay allocated during an update, so the peak is that of an update: weights, gradients and
moments in float32, the sampler's copy of the weights, its cache, the activations of one pass, and the logits of one
chunk. The factors of the activations are counted from a layer's operations, so they are estimates: docs/results.md
compares a prediction with a measurement (``python -m benchmarks.gpu.update``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.local.update.grpo_config import GRPOConfig
from groundwire.train.local.update.lora import adapters
from groundwire.train.policy.compute import bf16_is_faster
from groundwire.train.policy.decoding.decoder import check_supported
from groundwire.train.policy.decoding.gpu_decoder import GPUDecoder
from groundwire.train.policy.model import count_parameters
from groundwire.train.policy.pretrained.locate import find_model

__all__ = ["MemoryPlan", "plan_memory", "plan_run", "settings_for_model"]

_KEPT = (40, 8)
"""Bytes of a token's activations in one layer, per hidden unit and per unit of the feed-forward layer."""
_WORKING = 1.5
"""A layer's activations and their gradients, relative to the activations."""
_LOGIT_BYTES = 20
"""Of a logit in the chunk: float32 and bfloat16 copies, softmax and gradient."""
_USABLE = 0.9
"""The part of a GPU's memory that is planned with; the rest is for fragments and the CUDA context."""
_TOKENS = (1024, 65536)
"""Least and most tokens of a pass that are chosen. Longer passes are not faster."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, and the tokens of a pass that they are for."""

    weights: int
    """With the copies in bfloat16 that a pass makes; also those of the reference policy."""
    gradients: int
    optimizer: int
    sampler: int
    """The sampler's copy of the weights, and one more while it takes new ones."""
    cache: int
    """Keys and values of the sampler's longest batch, and of earlier prompts; and what it needs more than a pass does
    while it grows, when the old half and the new whole exist at once."""
    activations: int
    logits: int
    tokens_per_forward: int

    @property
    def total(self) -> int:
        """The predicted peak in bytes."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "tokens_per_forward")

    def __str__(self) -> str:
        parts = [
            f"{field.name} {getattr(self, field.name) / 1e9:.1f}"
            for field in fields(self)
            if field.name != "tokens_per_forward"
        ]
        return f"{self.total / 1e9:.1f} GB ({', '.join(parts)}) with {self.tokens_per_forward:,} tokens a pass"


def plan_memory(
    model: Any,
    settings: GRPOConfig,
    *,
    parameters: int,
    trained: int | None = None,
    available: int,
    max_batch: int,
    max_model_len: int,
    tokens_per_forward: int | None = None,
) -> MemoryPlan:
    """The plan of a run on a GPU with ``available`` bytes.

    ``model`` is a Hugging Face config, ``parameters`` the number of its parameters; ``trained`` of them have gradients,
    by default all. If only some do, or without a KL term, there is no copy of the model as reference. Without
    ``tokens_per_forward`` the largest power of two that fits is taken; a pass has at least one trajectory of
    ``max_model_len`` tokens.

    Raises:
        ConfigError: not even the smallest pass fits.
    """
    hidden, feed_forward, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head = getattr(model, "head_dim", None) or hidden // model.num_attention_heads
    size = 2 if settings.bf16 else 4
    cached_tokens = max_batch * max_model_len, GPUDecoder.prefix_cache_tokens
    least = max(_TOKENS[0], max_model_len)
    references = int(settings.kl_coef > 0 and trained is None)
    trained = parameters if trained is None else trained

    def plan(tokens: int) -> MemoryPlan:
        layer = tokens * (_KEPT[0] * hidden + _KEPT[1] * feed_forward)
        inputs = tokens * 4 * hidden
        kept = layers * inputs + _WORKING * layer if settings.gradient_checkpointing else (layers + _WORKING) * layer
        logits = min(settings.logits_per_chunk, tokens * model.vocab_size) * _LOGIT_BYTES
        batch, prefixes = (2 * size * layers * heads * head * each for each in cached_tokens)
        return MemoryPlan(
            weights=parameters * (6 if settings.bf16 else 4) * (1 + references),
            gradients=trained * 4,
            optimizer=trained * 8,
            sampler=2 * parameters * size,
            cache=batch + prefixes + max(0, batch // 2 - int(kept) - logits),
            activations=int(kept),
            logits=logits,
            tokens_per_forward=tokens,
        )

    chosen = tokens_per_forward
    if chosen is None:
        chosen = _TOKENS[1]
        while chosen > least and plan(chosen).total > _USABLE * available:
            chosen //= 2
    made = plan(max(chosen, least))
    if made.total > _USABLE * available:
        raise ConfigError(
            f"the run needs {made}, and the GPU has {available / 1e9:.1f} GB: lower max_model_len ({max_model_len}), "
            f"max_batch ({max_batch}) or tokens_per_forward, set gradient_checkpointing=on, or take a smaller model"
        )
    return made


def settings_for_model(config: RunConfig, model: Any, max_model_len: int) -> GRPOConfig:
    """The settings of the update of a loaded model; on a GPU with as many tokens a pass as its memory allows."""
    settings = GRPOConfig.from_settings(config)
    if not config.device.startswith("cuda"):
        return replace(settings, bf16=bf16_is_faster(model)) if config.precision == "auto" else settings
    plan = plan_memory(
        model.config,
        settings,
        parameters=count_parameters(model),
        trained=sum(each.numel() for each in adapters(model).values()) or None,
        available=torch.cuda.get_device_properties(config.device).total_memory,
        max_batch=config.max_batch,
        max_model_len=max_model_len,
        tokens_per_forward=config.tokens_per_forward,
    )
    print(f"memory: {plan} predicted", file=sys.stderr)
    return replace(settings, tokens_per_forward=plan.tokens_per_forward)


def plan_run(config: RunConfig, available: int) -> MemoryPlan:
    """:func:`plan_memory` for a run with these settings on a GPU; the model's weights are not loaded.

    Raises also :class:`groundwire.train.policy.errors.UnsupportedModelError`, as the run does.
    """
    folder = find_model(config.model)
    try:
        shape = AutoConfig.from_pretrained(folder, trust_remote_code=False)  # it would ask on the terminal
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model in {folder} cannot be read: {str(error).splitlines()[0]}") from error
    check_supported(model)
    parameters = count_parameters(model)
    linear = (each for each in model.model.modules() if isinstance(each, torch.nn.Linear))
    adapted = sum(config.lora_rank * (each.in_features + each.out_features) for each in linear)
    return plan_memory(
        shape,
        GRPOConfig.from_settings(config),
        parameters=parameters,
        trained=adapted or None,
        available=available,
        max_batch=config.max_batch,
        max_model_len=min(config.max_model_len, shape.max_position_embeddings),
        tokens_per_forward=config.tokens_per_forward,
    )
