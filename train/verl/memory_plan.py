"""The peak memory of a run with verl on each of its GPUs, from the model's shape and the settings, before it starts.

Trainer and vLLM take turns: vLLM frees its memory during an update, and weights and moments stay while it samples. The
bytes of the activations were fitted to measurements, which docs/results.md compares with predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groundwire.train.config.errors import ConfigError
from groundwire.train.config.remedies import remedies

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
    available: int
    """The bytes of the GPU."""

    @property
    def update(self) -> int:
        """The predicted peak of an update in bytes."""
        return max(self.states + self.activations + self.logits, self.step)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name) / 1e9:.1f}" for name in ("states", "activations", "logits"))
        return (
            f"{self.update / 1e9:.1f} GB for an update ({parts}) with {self.tokens:,} tokens a micro-batch, "
            f"{self.sampling / 1e9:.1f} GB while sampling; the GPU has {self.available / 1e9:.1f} GB"
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
    adapters = sum(rank * (each.in_features + each.out_features) for each in linear)
    reference = parameters if values.get(f"{_ACTOR}use_kl_loss") else 0
    shards = _shards(values)
    layer = _ACTIVATIONS[0] * hidden + _ACTIVATIONS[1] * feed_forward
    checkpointing = bool(values.get("actor_rollout_ref.model.enable_gradient_checkpointing", True))

    def plan(
        tokens: int,
        *,
        recomputed: bool = checkpointing,
        lora: bool = rank > 0,
        gpus: int = shards,
        settings: Mapping[str, Any] = values,
    ) -> MemoryPlan:
        trained = (adapters or parameters // 50) if lora else parameters
        frozen = parameters if lora else reference

        def per_gpu(of_trained: int) -> int:
            return (of_trained * trained + _FROZEN * frozen) // gpus

        kept = layers * 2 * hidden if recomputed else layers * layer
        logits = _CHUNK if values.get("actor_rollout_ref.model.use_fused_kernels") else tokens
        return MemoryPlan(
            states=per_gpu(_STATES) + _COPY * parameters // gpus,
            activations=int(tokens * (kept + _WORKING * layer)),
            logits=logits * shape.vocab_size * _LOGIT_BYTES,
            step=per_gpu(_STEP),
            sampling=_sampling(settings, per_gpu(_KEPT), parameters, available),
            tokens=tokens,
            available=available,
        )

    chosen, usable = tokens or values[TOKENS], _USABLE * available
    length = values[f"{_ROLLOUT}max_model_len"]
    least = max(_LEAST_TOKENS, length)
    while tokens is None and chosen > least and plan(chosen).update > usable:
        chosen = max(least, chosen // 2)
    made = plan(chosen)
    if made.update > usable:
        changes: dict[str, dict[str, Any]] = {} if rank else {"set lora_rank=16": {"lora": True}}
        changes["add GPUs (trainer.n_gpus_per_node)"] = {"gpus": shards * 8}
        if length > _LEAST_TOKENS:
            name = f"lower max_model_len ({length})" + (f" and {TOKENS} ({tokens})" if tokens else "")
            changes[name] = {"tokens": _LEAST_TOKENS}
        if tokens and tokens > least:
            changes[f"lower {TOKENS} ({tokens})"] = {"tokens": least}
        if not checkpointing:
            changes["set actor_rollout_ref.model.enable_gradient_checkpointing=True"] = {"recomputed": True}
        helpful = remedies(changes, lambda **given: plan(**{"tokens": chosen, **given}).update <= usable)
        states = max(made.states, made.step)
        why = f"; weights, gradients and moments alone need {states / 1e9:.1f} GB" if states > usable else ""
        raise _too_large(made, helpful, why)
    if made.sampling > available:
        changes = _for_sampling(values)
        raise _too_large(made, remedies(changes, lambda **given: plan(chosen, **given).sampling <= available))
    return made


def _shards(values: Mapping[str, Any]) -> int:
    """The GPUs that share one copy of the trained model."""
    gpus = (values.get("trainer.n_gpus_per_node") or 1) * (values.get("trainer.nnodes") or 1)
    group = values.get(f"{_ACTOR}fsdp_config.fsdp_size") or -1
    return group if 0 < group < gpus else gpus


def _for_sampling(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Changes of settings with which vLLM may fit beside the trainer."""
    offload = {f"{_ACTOR}fsdp_config.{part}_offload": True for part in ("optimizer", "param")}
    cache = f"{_ROLLOUT}engine_kwargs.vllm.kv_cache_memory_bytes"
    name = f"{_ROLLOUT}gpu_memory_utilization" if values.get(cache) is None else cache
    return {
        f"lower {name} ({values[name]})": {"settings": {**values, name: 0}},
        f"set {'=True and '.join(offload)}=True": {"settings": {**values, **offload}},
    }


def _too_large(made: MemoryPlan, helpful: str, why: str = "") -> ConfigError:
    return ConfigError(
        f"the run needs {made}{why}: {f'{helpful}, or ' * bool(helpful)}take larger GPUs or a smaller model"
    )


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
