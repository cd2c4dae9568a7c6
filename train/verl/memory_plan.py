"""The memory of a run with verl on each of its GPUs.

Trainer and vLLM take turns: vLLM frees its memory during an update, and weights and moments stay while it samples. The
bytes of the activations were fitted to measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from groundwire.train.algorithms.model_size import WORKING, MemoryPlan, count_adapters, empty_model, plan_memory
from groundwire.train.config.presets import VERL_PRESETS
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy.pretrained.locate import check_hub, find_model, is_hub_name

_MODEL = "actor_rollout_ref.model."
_ROLLOUT = "actor_rollout_ref.rollout."
_ACTOR = "actor_rollout_ref.actor."
TOKENS = f"{_ACTOR}ppo_max_token_len_per_gpu"
_LORA_RANK = f"{_MODEL}lora_rank"
_CHECKPOINTING = f"{_MODEL}enable_gradient_checkpointing"
_UTILIZATION = f"{_ROLLOUT}gpu_memory_utilization"
_CACHE = f"{_ROLLOUT}engine_kwargs.vllm.kv_cache_memory_bytes"
_FSDP_SIZE = f"{_ACTOR}fsdp_config.fsdp_size"
_OFFLOAD = (f"{_ACTOR}fsdp_config.optimizer_offload", f"{_ACTOR}fsdp_config.param_offload")
_GPUS = "trainer.n_gpus_per_node"

_COPY = 2  # bytes of a parameter in a pass, in bfloat16
_ACTIVATIONS = (32, 6.4)  # bytes of a token in one layer, per hidden unit and per unit of the feed-forward layer
_LEAST_TOKENS = 2048


def plan_run(config: RunConfig, flat: Mapping[str, Any], available: int) -> MemoryPlan | None:
    """The plan of a run with verl's settings ``flat`` on GPUs with ``available`` bytes each.

    If the tokens of a micro-batch are not given, they are halved until an update fits; it has at least one row of
    ``max_model_len`` tokens. None for a model whose layers are not those of Llama, for padded rows, since the padding
    is not known, and for engines other than FSDP.

    Raises :class:`.ConfigError` if the update does not fit, or vLLM not beside the trainer, or there is no such model.
    """
    settings = {key.lstrip("+"): value for key, value in flat.items()}
    tokens = {**VERL_PRESETS[config.config], **config.verl}.get(TOKENS)
    if is_hub_name(model := config.model):
        check_hub(model)  # transformers would try for 25 s
    else:
        model = str(find_model(model))
    try:
        whole = empty_model(model)
    except (OSError, ValueError):  # the model is gated, or its architecture unknown here: verl says more about it
        return None
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers")
    padded = not settings.get(f"{_MODEL}use_remove_padding", True)
    if padded or settings.get("model_engine", "dp") != "dp" or not all(hasattr(whole.config, name) for name in sizes):
        return None
    length, rank = settings[f"{_ROLLOUT}max_model_len"], settings.get(_LORA_RANK) or 0
    least = max(_LEAST_TOKENS, length)
    changes: dict[str, dict[str, Any]] = {} if rank else {"set lora_rank=16": {_LORA_RANK: 16}}
    changes[f"add GPUs ({_GPUS})"] = {_GPUS: _shards(settings) * 8, _FSDP_SIZE: -1}
    if length > _LEAST_TOKENS:
        name = f"lower max_model_len ({length})" + (f" and {TOKENS} ({tokens})" if tokens else "")
        changes[name] = {TOKENS: _LEAST_TOKENS}
    if tokens and tokens > least:
        changes[f"lower {TOKENS} ({tokens})"] = {TOKENS: least}
    if not settings.get(_CHECKPOINTING, True):
        changes[f"set {_CHECKPOINTING}=True"] = {_CHECKPOINTING: True}
    memory = _UTILIZATION if settings.get(_CACHE) is None else _CACHE
    return plan_memory(
        partial(_plan, whole.config, whole.num_parameters(), count_adapters(whole, rank), available),
        {**settings, TOKENS: tokens or settings[TOKENS]},
        tokens=TOKENS,
        least=None if tokens else least,
        update=changes,
        sampling={
            f"lower {memory} ({settings.get(memory)})": {memory: 0},
            "set " + " and ".join(f"{name}=True" for name in _OFFLOAD): dict.fromkeys(_OFFLOAD, True),
        },
    )


def _plan(shape: Any, parameters: int, adapters: int, available: int, settings: Mapping[str, Any]) -> MemoryPlan:
    gpus, tokens = _shards(settings), settings[TOKENS]
    trained, frozen = parameters, parameters if settings.get(f"{_ACTOR}use_kl_loss") else 0
    if settings.get(_LORA_RANK):  # the frozen weights are the reference policy, too
        trained, frozen = adapters or parameters // 50, parameters

    def per_gpu(bytes_of_trained: int) -> int:
        return (bytes_of_trained * trained + 4 * frozen) // gpus

    layer = _ACTIVATIONS[0] * shape.hidden_size + _ACTIVATIONS[1] * shape.intermediate_size
    recomputed = settings.get(_CHECKPOINTING, True)
    kept = shape.num_hidden_layers * (2 * shape.hidden_size if recomputed else layer)
    parts = {
        # Of a trained parameter: weight, gradient and Adam's two moments in float32.
        "states": per_gpu(16) + _COPY * parameters // gpus,
        "activations": int(tokens * (kept + WORKING * layer)),
        # A logit in bfloat16, its gradient, and a copy in float32. The fused kernels make those of 512 tokens at once.
        "logits": (512 if settings.get(f"{_MODEL}use_fused_kernels") else tokens) * shape.vocab_size * 8,
    }
    return MemoryPlan(
        parts=parts,
        tokens=tokens,
        available=available,
        optimizer_step=per_gpu(20),  # the size of one moment more
        sampling=_sampling(settings, per_gpu(12), parameters, available),  # without the gradient
    )


def _sampling(settings: Mapping[str, Any], kept: int, parameters: int, available: int) -> int:
    """vLLM's memory, and the weights and moments that stay beside it."""
    if settings.get("trainer.v1.trainer_mode") == "separate_async":  # vLLM has GPUs of its own
        return 0
    optimizer, weights_too = map(settings.get, _OFFLOAD)
    if optimizer:
        kept = 0 if weights_too else kept // 3
    cache = settings.get(_CACHE)
    if cache is None:
        return kept + int(settings[_UTILIZATION] * available)
    weights = _COPY * parameters // (settings.get(f"{_ROLLOUT}tensor_model_parallel_size") or 1)
    # CUDA graphs and workspace are a part of gpu_memory_utilization and not of kv_cache_memory_bytes.
    return kept + cache + weights + (4 << 30)


def _shards(settings: Mapping[str, Any]) -> int:
    """The GPUs that share one copy of the trained model."""
    gpus = (settings.get(_GPUS) or 1) * (settings.get("trainer.nnodes") or 1)
    group = settings.get(_FSDP_SIZE) or -1
    return group if 0 < group < gpus else gpus
