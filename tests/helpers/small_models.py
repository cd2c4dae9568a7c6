"""Models with random weights for tests that look at the weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

__all__ = ["ARCHITECTURES", "small_causal_lm", "small_model"]

_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512, "sliding_window": 8,
    "query_pre_attn_scalar": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "shared_intermediate_size": 48, "use_sliding_window": False, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "logits_scaling": 4.0},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mistral": {},
    "olmo3": {},
    "phi": {"resid_pdrop": 0.3, "embd_pdrop": 0.3},
    "phi3": {},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "smollm3": {"no_rope_layers": [1, 0] * 2},
}
"""Model types outside of those that our decoder computes, with what makes each special."""


def small_causal_lm(kind: str, **more: Any) -> Any:
    """A model of the ``model_type`` in evaluation mode, always with the same weights, and windows of 8 tokens."""
    config = CONFIG_MAPPING[kind]
    names = config().to_dict()
    sizes = {name: size for name, size in {**_SIZES, **ARCHITECTURES.get(kind, {})}.items() if name in names}
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config(**{**sizes, **more}), dtype=torch.float32).eval()


def small_model(kind: Any, config: Any, **more: Any) -> Any:
    """A model of the class ``kind`` in evaluation mode, always with the same weights."""
    torch.manual_seed(3)
    return kind(
        config(
            vocab_size=339, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
            intermediate_size=64, max_position_embeddings=256, initializer_range=0.3, **more,
        )
    ).eval()  # fmt: skip
