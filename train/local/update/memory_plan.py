"""The peak memory of a local run on a GPU, from the model's shape and the settings, before anything is allocated.

The sampler's keys and values stay allocated during an update, so the peak is that of an update: weights, gradients and
moments in float32, the sampler's copy of the weights, its cache, the activations of one pass, and the logits of one
chunk. The factors of the activations are counted from a layer's operations, so they are estimates: docs/results.md
compares a prediction with a measurement (``python -m dev.gpu.update``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from groundwire.train.config.errors import ConfigError
from groundwire.train.config.remedies import remedies
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

_PARTS = ("weights", "gradients", "optimizer", "sampler", "cache", "activations", "logits")


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
    available: int
    """The bytes of the GPU."""

    @property
    def total(self) -> int:
        """The predicted peak in bytes."""
        return sum(getattr(self, name) for name in _PARTS)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name) / 1e9:.1f}" for name in _PARTS)
        return (
            f"{self.total / 1e9:.1f} GB ({parts}) with {self.tokens_per_forward:,} tokens a pass; "
            f"the GPU has {self.available / 1e9:.1f} GB"
        )


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
    adapted = trained is not None

    def plan(
        tokens: int,
        *,
        batch: int = max_batch,
        length: int = max_model_len,
        recomputed: bool = settings.gradient_checkpointing,
        lora: bool = adapted,
    ) -> MemoryPlan:
        tokens = max(tokens, _TOKENS[0], length)
        with_gradients = parameters if not lora else parameters // 50 if trained is None else trained
        layer = tokens * (_KEPT[0] * hidden + _KEPT[1] * feed_forward)
        inputs = tokens * 4 * hidden
        kept = layers * inputs + _WORKING * layer if recomputed else (layers + _WORKING) * layer
        logits = min(settings.logits_per_chunk, tokens * model.vocab_size) * _LOGIT_BYTES
        sampled, prefixes = (
            2 * size * layers * heads * head * each for each in (batch * length, GPUDecoder.prefix_cache_tokens)
        )
        return MemoryPlan(
            weights=parameters * (6 if settings.bf16 else 4) * (1 + int(settings.kl_coef > 0 and not lora)),
            gradients=with_gradients * 4,
            optimizer=with_gradients * 8,
            sampler=2 * parameters * size,
            cache=sampled + prefixes + max(0, sampled // 2 - int(kept) - logits),
            activations=int(kept),
            logits=logits,
            tokens_per_forward=tokens,
            available=available,
        )

    usable = _USABLE * available
    chosen = tokens_per_forward
    if chosen is None:
        chosen = _TOKENS[1]
        while chosen > max(_TOKENS[0], max_model_len) and plan(chosen).total > usable:
            chosen //= 2
    made = plan(chosen)
    if made.total <= usable:
        return made
    changes: dict[str, dict[str, Any]] = {}
    if not adapted:
        changes["set lora_rank=16"] = {"lora": True}
    if max_batch > 1:
        changes[f"lower max_batch ({max_batch})"] = {"batch": 1}
    if max_model_len > _TOKENS[0]:
        changes[f"lower max_model_len ({max_model_len})"] = {"length": _TOKENS[0]}
    if tokens_per_forward is not None:
        changes[f"lower tokens_per_forward ({tokens_per_forward})"] = {"tokens": 0}
    if not settings.gradient_checkpointing:
        changes["set gradient_checkpointing=on"] = {"recomputed": True}
    helpful = remedies(changes, lambda **values: plan(**{"tokens": chosen, **values}).total <= usable)
    states = made.weights + made.gradients + made.optimizer + made.sampler
    why = f"; weights, gradients and moments alone need {states / 1e9:.1f} GB" if states > usable else ""
    raise ConfigError(
        f"the run needs {made}{why}: {f'{helpful}, or ' * bool(helpful)}take a larger GPU or a smaller model"
    )


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
    print(f"memory: predicted {plan}", file=sys.stderr)
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
