"""The peak memory of a run with verl on each of its GPUs, from the model's shape and the settings, before it starts.

Trainer and vLLM take turns: vLLM frees its memory during an update, and weights and moments stay while it samples. The
bytes of the activations were fitted to measurements, which docs/results.md compares with predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groundwire.train.config.errors import ConfigError

__all__ = ["TOKENS", "MemoryPlan", "plan_memory"]

_ROLLOUT = "actor_rollout_ref.rollout."
_ACTOR = "actor_rollout_ref.actor."
TOKENS = f"{_ACTOR}ppo_max_token_len_per_gpu"

_STATES = 16
"""Bytes of a trained parameter: weight, gradient and Adam's two moments in float32."""
_KEPT = 12
"""Of them between updates: all but the gradient."""
_STEP = 20
"""Of them while the optimizer computes its step, which needs the size of one moment more."""
_FROZEN = 4
_COPY = 2
"""Bytes of a parameter in a pass, in bfloat16."""
_ACTIVATIONS = (32, 6.4)
"""Bytes of a token's activations in one layer, per hidden unit and per unit of the feed-forward layer."""
_WORKING = 1.5
"""A layer's activations and their gradients, relative to the activations."""
_LOGIT_BYTES = 8
"""Of a logit: in bfloat16, its gradient, and a copy in float32."""
_CHUNK = 512
"""Tokens whose logits exist at once with verl's fused kernels."""
_VLLM_GRAPHS = 4 << 30
"""vLLM's CUDA graphs and workspace, a part of ``gpu_memory_utilization`` and not of ``kv_cache_memory_bytes``."""
_USABLE = 0.9
"""The part of a GPU's memory that is planned with; the rest is for fragments and the CUDA contexts."""
_LEAST_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one GPU by purpose, and the tokens of a micro-batch that they are for."""

    states: int
    """Weights, gradients, moments, and the weights of a pass; also those of the reference policy."""
    activations: int
    logits: int
    step: int
    """The peak while the optimizer computes its step."""
    sampling: int
    """vLLM's memory, and the weights and moments that stay beside it."""
    tokens: int

    @property
    def update(self) -> int:
        """The predicted peak of an update in bytes."""
        return max(self.states + self.activations + self.logits, self.step)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name) / 1e9:.1f}" for name in ("states", "activations", "logits"))
        return (
            f"{self.update / 1e9:.1f} GB for an update ({parts}) with {self.tokens:,} tokens a micro-batch, "
            f"{self.sampling / 1e9:.1f} GB while sampling"
        )


def plan_memory(model: str, flat: Mapping[str, Any], *, available: int, tokens: int | None = None) -> MemoryPlan | None:
    """The plan of a run with verl's settings ``flat`` on GPUs with ``available`` bytes each.

    ``model`` is a folder in Hugging Face's format or a name of the hub, of which only the configuration is read.
    Without ``tokens`` the value of ``flat`` is halved until an update fits; a micro-batch has at least one row of
    ``max_model_len`` tokens. None for a model whose layers are not those of Llama, for padded rows, since the padding
    is not known, and for engines other than FSDP.

    Raises:
        ConfigError: the update does not fit, or vLLM not beside the trainer.
        OSError: the model's configuration cannot be read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from groundwire.train.policy.model import count_parameters

    values = {key.lstrip("+"): value for key, value in flat.items()}
    shape = AutoConfig.from_pretrained(model, trust_remote_code=False)  # it would ask on the terminal
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers")
    fsdp = values.get("model_engine", "dp") == "dp"
    padded = not values.get("actor_rollout_ref.model.use_remove_padding", True)
    if padded or not fsdp or not all(hasattr(shape, name) for name in sizes):
        return None
    hidden, feed_forward, layers = (int(getattr(shape, name)) for name in sizes)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(shape)
    parameters, rank = count_parameters(whole), values.get("actor_rollout_ref.model.lora_rank") or 0
    linear = (each for each in whole.base_model.modules() if isinstance(each, torch.nn.Linear))
    trained = sum(rank * (each.in_features + each.out_features) for each in linear) or parameters
    frozen = parameters if rank else 0
    reference = parameters if values.get(f"{_ACTOR}use_kl_loss") and not rank else 0
    shards = (values.get("trainer.n_gpus_per_node") or 1) * (values.get("trainer.nnodes") or 1)
    layer = _ACTIVATIONS[0] * hidden + _ACTIVATIONS[1] * feed_forward

    def per_gpu(of_trained: int) -> int:
        return (of_trained * trained + _FROZEN * (frozen + reference)) // shards

    def plan(tokens: int) -> MemoryPlan:
        recomputed = values.get("actor_rollout_ref.model.enable_gradient_checkpointing", True)
        kept = layers * 2 * hidden if recomputed else layers * layer
        logits = _CHUNK if values.get("actor_rollout_ref.model.use_fused_kernels") else tokens
        return MemoryPlan(
            states=per_gpu(_STATES) + _COPY * parameters // shards,
            activations=int(tokens * (kept + _WORKING * layer)),
            logits=logits * shape.vocab_size * _LOGIT_BYTES,
            step=per_gpu(_STEP),
            sampling=_sampling(values, per_gpu(_KEPT), parameters, available),
            tokens=tokens,
        )

    chosen = tokens or values[TOKENS]
    least = max(_LEAST_TOKENS, values[f"{_ROLLOUT}max_model_len"])
    while tokens is None and chosen > least and plan(chosen).update > _USABLE * available:
        chosen = max(least, chosen // 2)
    made = plan(chosen)
    if made.update > _USABLE * available:
        raise ConfigError(
            f"the run needs {made}, and the GPU has {available / 1e9:.1f} GB: lower max_model_len or {TOKENS}, "
            "set actor_rollout_ref.model.enable_gradient_checkpointing=True, add GPUs, or take a smaller model"
        )
    if made.sampling > available:
        raise ConfigError(
            f"the run needs {made}, and the GPU has {available / 1e9:.1f} GB: lower {_ROLLOUT}gpu_memory_utilization, "
            f"or set {_ACTOR}fsdp_config.optimizer_offload=True and {_ACTOR}fsdp_config.param_offload=True"
        )
    return made


def _sampling(values: Mapping[str, Any], kept: int, parameters: int, available: int) -> int:
    if values.get("trainer.v1.trainer_mode") == "separate_async":  # vLLM has GPUs of its own
        return 0
    if values.get(f"{_ACTOR}fsdp_config.optimizer_offload"):
        kept = 0 if values.get(f"{_ACTOR}fsdp_config.param_offload") else kept // 3
    cache = values.get(f"{_ROLLOUT}engine_kwargs.vllm.kv_cache_memory_bytes")
    if cache is None:
        return kept + int(values[f"{_ROLLOUT}gpu_memory_utilization"] * available)
    return (
        kept + cache + _COPY * parameters // (values.get(f"{_ROLLOUT}tensor_model_parallel_size") or 1) + _VLLM_GRAPHS
    )
