"""The starter's architecture, with random weights.

The starter's ``model_type`` is ``llama``. With ``qwen2`` or ``qwen3``, ``AutoTokenizer`` would build that family's
tokenizer from our vocabulary and silently drop our normalizer and decoder, so that every prompt had other ids.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["new_policy"]


def new_policy(
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    intermediate: int = 352,
    context: int = 4096,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A float32 decoder with random weights and the vocabulary of ``tokenizer``; by default 1.2 M parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=context,
        initializer_range=0.6 / math.sqrt(width),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # keeps the scale of the residual stream over depth (GPT-2, section 2.3)
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data.mul_(1 / math.sqrt(2 * layers))
    return model.eval()
