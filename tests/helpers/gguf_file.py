"""Writes a tiny model as a GGUF file, as llama.cpp's converter does: for the tests of models that come as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of SmolLM2-135M-Instruct, which has no tools."""


def write_gguf(
    file: Path,
    *,
    architecture: str = "llama",
    tokens: int | None = None,
    splitter: str = "smollm",
    heads: int = 4,
    left_out: str = "",
    end: int = 2,
    positions: int = 1024,
) -> LlamaForCausalLM:
    """Write a random model with a tokenizer of bytes (and two merged words) to ``file``; returns the model.

    Only the first ``tokens`` tokens of the tokenizer are written; with 0 none. The tensor, or the field,
    ``left_out`` is not written. ``end`` is the id of the token that ends a reply.
    """
    vocabulary = [*SPECIAL, *sorted(bytes_to_unicode().values()), "ĠĠ", "SE"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    ).eval()
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_name("tiny")
    writer.add_context_length(positions)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(32 // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(vocabulary))
    if tokens != 0:
        kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(vocabulary) - len(SPECIAL))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splitter)
        writer.add_token_list(vocabulary[:tokens])
        writer.add_token_types(kinds[:tokens])
        if left_out != "merges":
            writer.add_token_merges(["Ġ Ġ", "S E"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(end)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE)
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        values = tensor.numpy()
        for part, count in (("q_proj", heads), ("k_proj", 2)):
            if part in name:  # llama.cpp rotates neighbours, transformers halves
                width = values.shape[0] // count // 2
                values = values.reshape(count, 2, width, -1).swapaxes(1, 2).reshape(values.shape)
        stored = names.get_name(name, try_suffixes=(".weight",))
        if stored != left_out:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
