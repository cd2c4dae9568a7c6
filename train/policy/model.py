"""The policy: a small Llama-shaped decoder that transformers and vLLM load as it stands.

``model_type`` is ``llama`` on purpose: beside ``qwen2`` or ``qwen3``, ``AutoTokenizer`` builds that family's own
tokenizer from our vocabulary and silently drops our normalizer and decoder, and every prompt then has other ids.

On Linux, freed tensors are kept in the heap (``mallopt``): with matrices this small, page faults on every allocation
cost more than the arithmetic. Importing this module is enough.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from groundwire.train.policy.errors import ModelUnreadableError

__all__ = ["count_parameters", "fitting_length", "load_policy", "new_policy", "save_policy"]


def _keep_freed_memory() -> None:
    """Never mmap single blocks, never trim, grow the heap by 256 MB at a time (glibc only)."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (AttributeError, OSError):
        return
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 256 << 20)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        mallopt(option, value)


_keep_freed_memory()
logging.disable_progress_bar()  # a bar for one shard of four megabytes


def new_policy(
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    intermediate: int = 352,
    context: int = 2048,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A decoder with random weights for the ids of ``tokenizer``; the defaults make about 1.1 M parameters, float32.

    Fewer ``kv_heads`` than ``heads`` share keys and values (grouped-query attention, arXiv 2305.13245).
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
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
    for layer in model.model.layers:  # the residual stream keeps its scale over depth (GPT-2, section 2.3)
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data.mul_(1 / math.sqrt(2 * layers))
    return model.eval()


def load_policy(path: str | Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model (float32, evaluation mode, on the CPU) and the tokenizer of a checkpoint folder.

    Raises :class:`FileNotFoundError` where ``path`` is not a checkpoint folder: nothing is ever fetched from a hub; and
    :class:`ModelUnreadableError` where what is in it cannot be loaded.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"no checkpoint in {folder}: config.json is missing; give a folder saved by transformers"
        )
    what = "model"
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        what = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (MemoryError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each library below has errors of its own for a file that is missing or damaged
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if what == "tokenizer" and not (folder / "tokenizer.json").is_file():
            why = "there is no tokenizer.json; save it there, too, with the tokenizer's save_pretrained"
        raise ModelUnreadableError(f"the {what} in {folder} cannot be loaded: {why}") from error
    return model.eval(), tokenizer


def save_policy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, path: str | Path) -> None:
    """Write ``model`` (safetensors) and ``tokenizer`` into the folder ``path``, made if it is not there."""
    model.save_pretrained(path)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(path)
    # The class that transformers 4 and 5 both know; 5 would write one that 4 cannot load.
    config = Path(path) / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def fitting_length(model: torch.nn.Module, max_model_len: int) -> int:
    """``max_model_len``, or the model's own positions where those are fewer, which is said on stderr."""
    own = getattr(model.config, "max_position_embeddings", None) or max_model_len
    if own < max_model_len:
        print(f"model: its positions end at {own}, so max_model_len is {own}, not {max_model_len}", file=sys.stderr)
    return int(min(own, max_model_len))


def count_parameters(model: torch.nn.Module) -> int:
    """Trainable numbers in ``model``; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())
