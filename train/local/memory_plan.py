"""The memory of the local trainer.

The sampler's keys and values stay allocated during an update, so the peak is that of an update: weights, gradients and
moments in float32, the sampler's copy of the weights, its cache, the activations of one pass, and the logits of one
chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from groundwire.tools.machine import address_space, total_memory
from groundwire.tools.secrets import say
from groundwire.train.algorithms.model_size import WORKING, MemoryPlan, count_adapters, empty_model, plan_memory
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.local.grpo import GRPOConfig
from groundwire.train.local.lora import adapters
from groundwire.train.policy.decoding.decoder import computes
from groundwire.train.policy.decoding.gpu_decoder import GPUDecoder
from groundwire.train.policy.model import bf16_is_faster, fitting_length, key_value_bytes
from groundwire.train.policy.pretrained.locate import find_model
from groundwire.train.policy.pretrained.model_files import count_stored_parameters
from groundwire.train.policy.vllm.engine import ASLEEP_BYTES, cache_bytes

_KEPT = (40, 8)  # bytes of a token's activations in one layer, per hidden unit and per unit of the feed-forward layer
_LOGIT_BYTES = 20  # of a logit in the chunk: float32 and bfloat16 copies, softmax and gradient
_TOKENS = (1024, 65536)  # least and most tokens of a pass that are chosen: longer ones are not faster


def plan_for_model(
    config: RunConfig, shape: Any, *, parameters: int, adapters: int, available: int, max_model_len: int
) -> MemoryPlan:
    """The plan of a run on a GPU with ``available`` bytes, or a :class:`ConfigError` if no pass fits.

    ``shape`` is a Hugging Face config. Only the ``adapters`` have gradients, if there are any.
    """
    update = GRPOConfig.from_settings(config)
    settings = {
        "tokens_per_forward": _TOKENS[1],
        "max_batch": config.max_batch,
        "max_model_len": max_model_len,
        "lora": adapters > 0,
        "recomputed": update.gradient_checkpointing,
    }
    changes: dict[str, dict[str, Any]] = {} if adapters else {"set lora_rank=16": {"lora": True}}
    if config.max_batch > 1:
        changes[f"lower n_runners ({config.max_batch})"] = {"max_batch": 1}
    if max_model_len > _TOKENS[0]:
        changes[f"lower max_model_len ({max_model_len})"] = {"max_model_len": _TOKENS[0]}
    return plan_memory(
        partial(_plan, shape, update, parameters, adapters, available, config.sampler == "vllm"),
        settings,
        tokens="tokens_per_forward",
        least=max(_TOKENS[0], max_model_len),
        update=changes,
    )


def _plan(
    shape: Any,
    update: GRPOConfig,
    parameters: int,
    adapters: int,
    available: int,
    vllm: bool,
    settings: Mapping[str, Any],
) -> MemoryPlan:
    batch, length, lora = settings["max_batch"], settings["max_model_len"], settings["lora"]
    tokens = max(settings["tokens_per_forward"], _TOKENS[0], length)  # a pass has at least one trajectory
    size = 2 if update.bf16 else 4
    trained = (adapters or parameters // 50) if lora else parameters
    copies = 2 if update.kl_coef > 0 and not lora else 1  # without adapters the reference policy is another model
    layers = shape.num_hidden_layers
    layer = tokens * (_KEPT[0] * shape.hidden_size + _KEPT[1] * _feed_forward(shape))
    inputs = tokens * 4 * shape.hidden_size
    kept = layers * inputs + WORKING * layer if settings["recomputed"] else (layers + WORKING) * layer
    logits = min(update.logits_per_chunk, tokens * shape.vocab_size) * _LOGIT_BYTES
    of_token = key_value_bytes(shape, size)
    sampled = of_token * batch * length
    # The keys and values of the longest batch, and of earlier prompts. While the cache grows, the old half and the new
    # whole exist at once: what that needs more than a pass does counts, too.
    sampler = {
        "sampler": 2 * parameters * size,  # its copy of the weights, and one more while it takes new ones
        "cache": sampled + of_token * GPUDecoder.prefix_cache_tokens + max(0, sampled // 2 - int(kept) - logits),
    }
    if not computes(shape):  # a copy of the model, and no earlier prompts; with windows and states its cache is smaller
        sampler = {"sampler": parameters * size, "cache": sampled}
    if vllm:  # it sleeps during a pass
        cache = cache_bytes(shape, size=size, tokens=batch * length, available=available)
        sampler = {"sampler": ASLEEP_BYTES, "cache": max(0, parameters * size + cache - int(kept) - logits)}
    parts = {
        "weights": parameters * (6 if update.bf16 else 4) * copies,  # with the copies in bfloat16 that a pass makes
        "gradients": trained * 4,
        "optimizer": trained * 8,
        **sampler,
        "activations": int(kept),
        "logits": logits,
    }
    return MemoryPlan(parts=parts, tokens=tokens, available=available)


def _feed_forward(shape: Any) -> int:
    """The units of a layer that each token passes; with experts, those of its experts."""
    width = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    width = max(width) if isinstance(width, list) else width
    experts = getattr(shape, "num_experts_per_tok", None) or 1
    return max(width, int(experts * (getattr(shape, "moe_intermediate_size", None) or width)))


def check_host(config: RunConfig, available: int | None = None) -> None:
    """Raise :class:`ConfigError` if a run on the CPU needs more than the machine's memory, ``available`` bytes.

    Only what any update needs is counted, since the system ends a process that takes more.
    """
    available = available or int(min(total_memory(), address_space()))
    try:
        parameters = count_stored_parameters(find_model(config.model))
    except (OSError, ValueError):
        return  # who reads the weights says more
    trained = parameters // 50 if config.lora_rank else parameters
    needed = 8 * parameters + 12 * trained  # weights and the sampler's copy; gradients and moments
    if needed > available:
        raise ConfigError(
            f"the run needs {needed / 1e9:.1f} GB for weights, the sampler's copy, gradients and moments of "
            f"{parameters / 1e9:.2f} billion parameters, and this machine has {available / 1e9:.1f} GB: "
            f"{'' if config.lora_rank else 'set lora_rank=16, or '}take a larger machine or a smaller model"
        )


def settings_for_model(config: RunConfig, model: Any, max_model_len: int) -> GRPOConfig:
    """The settings of the update of a loaded model; on a GPU with as many tokens a pass as its memory allows."""
    settings = GRPOConfig.from_settings(config)
    if not config.device.startswith("cuda"):
        return replace(settings, bf16=bf16_is_faster(model)) if config.bf16 is None else settings
    plan = plan_for_model(
        config,
        model.config,
        parameters=model.num_parameters(),
        adapters=sum(value.numel() for value in adapters(model).values()),
        available=torch.cuda.get_device_properties(config.device).total_memory,
        max_model_len=max_model_len,
    )
    say(f"memory: predicted {plan}", err=True)
    return replace(settings, tokens_per_forward=plan.tokens)


def plan_run(config: RunConfig, available: int) -> MemoryPlan:
    """:func:`plan_for_model` for a run with these settings; the model's weights are not loaded."""
    folder = find_model(config.model)
    try:
        model = empty_model(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model in {folder} cannot be read: {str(error).splitlines()[0]}") from error
    return plan_for_model(
        config,
        model.config,
        parameters=model.num_parameters(),
        adapters=count_adapters(model, config.lora_rank),
        available=available,
        max_model_len=fitting_length(model, config.max_model_len),
    )
