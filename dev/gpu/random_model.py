"""Models with random weights of any shape: the time of a training step does not depend on the weights.

python -m dev.gpu.random_model SHAPE FOLDER        # 135m, 0.5b, 1.5b, or e.g. llama-1024x24
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from dev.gpu.update import SHAPES
from groundwire.train.policy import STARTER
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.pretrained.locate import find_model
from groundwire.train.policy.pretrained.model_files import save_policy

__all__ = ["check_shape", "llama_config", "save_random_model"]

_SHAPE = re.compile(r"\w+-\d+x\d+")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def llama_config(shape: str, **others: int) -> LlamaConfig:
    """A Llama model with the sizes of :data:`dev.gpu.update.SHAPES`; ``others`` are of the tokenizer."""
    sizes = {name: getattr(SHAPES[shape], name) for name in _SIZES}
    return LlamaConfig(**sizes, **others, max_position_embeddings=8192, tie_word_embeddings=True)


def check_shape(shape: str) -> None:
    """Raise ``ValueError`` for a shape that :func:`save_random_model` does not know."""
    if shape not in SHAPES and not _SHAPE.fullmatch(shape):
        raise ValueError(
            f"the shape {shape!r} is neither {', '.join(SHAPES)} nor TYPE-WIDTHxLAYERS, e.g. llama-1024x24"
        )


def save_random_model(shape: str, folder: Path) -> None:
    """Save a model with the starter's tokenizer; ``llama-1024x24`` is model type, hidden size and number of layers.

    ``135m``, ``0.5b`` and ``1.5b`` are Llama models of :data:`dev.gpu.update.SHAPES` with SmolLM2's tokenizer.
    Beside ``qwen2`` transformers reads the tokenizer as one of that family, which makes more tokens of the same text.
    Raises ``ValueError`` for another form.
    """
    check_shape(shape)
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
    _, tokenizer = load_policy(STARTER)
    kind, sizes = shape.split("-")
    width, layers = map(int, sizes.split("x"))
    heads = width // (64 if width <= 1024 else 128)
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m dev.gpu.random_model", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    try:
        save_random_model(given.shape, given.folder)
    except ValueError as error:
        parser.error(str(error))
