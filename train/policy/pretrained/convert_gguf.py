"""Converts a GGUF file into a folder in Hugging Face's format: weights in bfloat16, tokenizer, chat template.

transformers reads the file; here is what it leaves out. It calls the model quantized, so that it could not be saved.
The tokenizer of SmolLM splits numbers into digits before its merges, which transformers does not read from the file.
transformers 5.10 also takes the first token of a text for the one that ends a reply, and gives a tokenizer of bytes the
decoder of another kind, with which grammars find no token that begins with a space.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from groundwire.train.policy.chat.template import own_templates
from groundwire.train.policy.errors import ModelUnreadableError
from groundwire.train.policy.pretrained.model_files import quiet, save_policy

_SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
"""The special tokens of a tokenizer, and the names of their ids in a file."""
_TEST_TEXT = "SELECT count(*) FROM t WHERE year > 1999"


def convert(file: Path, folder: Path, *, template: str = "") -> None:
    """Write the model of ``file`` into the empty ``folder``. Raises :class:`ModelUnreadableError`.

    ``template`` ``smollm2`` replaces the chat template by one that has tools, and is equal without them.
    """
    source: Any = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    what = "file"
    try:
        fields = _read_header(file)
        what = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
        _complete_tokenizer(tokenizer, fields)
        what = "model"
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.bfloat16, trust_remote_code=False, output_loading_info=True
            )
        if missing := sorted(info["missing_keys"]):  # tied weights are not among them
            raise ValueError(f"it has no tensor for {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}")
        if len(tokenizer) > (rows := model.get_input_embeddings().num_embeddings):
            raise ValueError(f"the tokenizer has {len(tokenizer)} tokens and the model embeddings for {rows}")
        # The weights are no longer quantized, and transformers would not save a model that is.
        model.config.__dict__.pop("quantization_config", None)
        model.hf_quantizer = None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the libraries raise many types for unknown and damaged files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ModelUnreadableError(
            f"the {what} of {file} cannot be read: {reason}; copy or download it again, or use another file"
        ) from error
    if template == "smollm2":
        tokenizer.chat_template = own_templates()[1]
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    save_policy(model, tokenizer, folder)


def _read_header(file: Path) -> dict[str, Any]:
    """Raises ``ValueError`` for an unusable file."""
    from gguf import GGUFReader

    with open(file, "rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF, so it is no GGUF file")
    try:
        fields = GGUFReader(os.fspath(file)).fields  # also looks at each tensor's place
    except Exception as error:  # numpy raises many types where the file ends too early
        raise ValueError(f"its {file.stat().st_size:,} bytes are damaged, or not all of the file") from error
    wanted = ("general.architecture", *(f"tokenizer.ggml.{name}" for name in ("model", "pre", *_SPECIAL.values())))
    settings = {name: fields[name].contents() for name in wanted if name in fields}
    if not settings.get("general.architecture"):
        raise ValueError("it has no general.architecture")
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError("it has no tokenizer (tokenizer.ggml.tokens)")
    if not fields.keys() & {"tokenizer.ggml.merges", "tokenizer.ggml.scores"}:
        raise ValueError("its tokenizer has no merges (tokenizer.ggml.merges)")
    size = len(fields["tokenizer.ggml.tokens"].data)
    for key in _SPECIAL.values():
        token = settings.get(name := f"tokenizer.ggml.{key}", 0)
        if not isinstance(token, int) or not 0 <= token < size:
            raise ValueError(f"{name} is {token!r}, and its tokenizer has {size:,} tokens")
    return settings


def _complete_tokenizer(tokenizer: Any, fields: dict[str, Any]) -> None:
    """Split, decode and end as the file says. Raises ``ValueError`` if it cannot read back what it wrote."""
    backend = tokenizer.backend_tokenizer
    if fields.get("tokenizer.ggml.model") == "gpt2":
        backend.decoder = decoders.ByteLevel()
    if fields.get("tokenizer.ggml.pre") == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    for name, key in _SPECIAL.items():
        if (token := fields.get(f"tokenizer.ggml.{key}")) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(token)))
    if tokenizer.eos_token_id is None:
        raise ValueError("it has no token that ends a reply (tokenizer.ggml.eos_token_id)")
    ids = tokenizer(_TEST_TEXT, add_special_tokens=False)["input_ids"]
    if (text := tokenizer.decode(ids).strip()) != _TEST_TEXT:
        raise ValueError(f"it reads {_TEST_TEXT!r} back as {text!r}")
