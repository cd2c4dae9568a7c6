"""Models with random weights of any shape: the time of a training step does not depend on the weights."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from benchmarks.gpu.update import SHAPES
from groundwire.train.policy import STARTER
from groundwire.train.policy.model import load_policy, save_policy
from groundwire.train.policy.pretrained.locate import find_model

__all__ = ["llama_config", "save_random_model"]

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def llama_config(shape: str, **others: int) -> LlamaConfig:
    """A Llama model with the sizes of :data:`benchmarks.gpu.update.SHAPES`; ``others`` are of the tokenizer."""
    sizes = {name: getattr(SHAPES[shape], name) for name in _SIZES}
    return LlamaConfig(**sizes, **others, max_position_embeddings=8192, tie_word_embeddings=True)


def save_random_model(shape: str, folder: Path) -> None:
    """Save a model with the starter's tokenizer; ``llama-1024x24`` is model type, hidden size and number of layers.

    ``135m``, ``0.5b`` and ``1.5b`` are Llama models of :data:`benchmarks.gpu.update.SHAPES` with SmolLM2's tokenizer.
    Beside ``qwen2`` transformers reads the tokenizer as one of that family, which makes more tokens of the same text.
    Raises ``ValueError`` for another form.
    """
    torch.manual_seed(0)
    if shape in SHAPES:
        tokenizer = AutoTokenizer.from_pretrained(find_model("smollm2"))
        config = llama_config(
            shape,
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        save_policy(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tokenizer, folder)
        return
    match = re.fullmatch(r"(\w+)-(\d+)x(\d+)", shape)
    if match is None:
        raise ValueError(
            f"the shape {shape!r} is neither {', '.join(SHAPES)} nor TYPE-WIDTHxLAYERS, e.g. llama-1024x24"
        )
    _, tokenizer = load_policy(STARTER)
    width = int(match[2])
    heads = width // (64 if width <= 1024 else 128)
    config = AutoConfig.for_model(
        match[1],
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=int(match[3]),
        num_attention_heads=heads,
        num_key_value_heads=heads if heads <= 16 else 8,
        intermediate_size=-(-width * 8 // 3 // 256) * 256,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_policy(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tokenizer, folder)
