"""A model's folder: saves it, and checks it before transformers reads it.

A damaged file must not fill the memory or wait for ever.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from groundwire.tools.files import read_bytes, read_json, shorten_repr

_MAX_GROWTH = 16
"""A model may have this many times the numbers of its file: four bits of a quantized weight, and untied embeddings."""


def check_model_files(folder: Path) -> None:
    """Raise ``ValueError`` or ``OSError`` for what cannot be a model's folder; the libraries have errors of their own.

    A model is built without memory for its weights, and compared with the sizes in the files of weights.
    """
    logging.disable_progress_bar()  # transformers would show one for every file that it reads or writes
    for file in folder.iterdir():
        if not file.is_file() and not file.is_dir():
            raise ValueError(f"{file.name} is not a regular file")
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists() and not read_bytes(tokenizer).lstrip().startswith(b"{"):
        raise ValueError("tokenizer.json holds no tokenizer")
    for file in (*folder.glob("*config.json"), *folder.glob("*.index.json")):
        if not isinstance(values := read_json(file), dict):
            raise ValueError(f"{file.name} holds {shorten_repr(values)}, not settings")
    stored = _stored_sizes(folder)
    if not stored:
        return  # transformers names the missing file
    for name, value in _numbers(read_json(folder / "config.json")):
        if "layer" in name and name != "max_window_layers" and value > len(stored):  # that one is no number of layers
            raise ValueError(f"config.json has {name} {value:g}, and the files of weights have {len(stored)} tensors")
    with torch.device("meta"):
        # config.json may name an attention that this machine does not have.
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, attn_implementation="sdpa"))
    numbers = sum(tensor.numel() for tensor in itertools.chain(model.parameters(), model.buffers()))
    if numbers > _MAX_GROWTH * sum(stored):
        raise ValueError(f"config.json describes a model of {numbers:,} numbers, and its weights are {sum(stored):,}")


def save_policy(model: Any, tokenizer: Any, path: str | Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write ``model`` (safetensors) and ``tokenizer`` into the folder ``path``, which is created if needed.

    ``weights``, by their names in the model, are written in place of the model's own.
    """
    logging.disable_progress_bar()
    model.save_pretrained(path, state_dict=weights)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(path)
    # transformers 5 would write a class that transformers 4 cannot load; both know this one.
    config = Path(path) / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def count_stored_parameters(folder: Path) -> int:
    """The number of values in the files of weights. Raises ``ValueError`` and ``OSError`` if there are none."""
    try:
        count = sum(_stored_sizes(folder))
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if not count:
        raise ValueError("there are no files of weights")
    return count


def _stored_sizes(folder: Path) -> list[int]:
    """The number of values of each tensor in the folder."""
    sizes = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            sizes += [math.prod(opened.get_slice(name).get_shape()) for name in opened.keys()]  # noqa: SIM118
    for file in sorted(folder.glob("pytorch_model*.bin")) if not sizes else ():
        weights = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        sizes += [weight.numel() for weight in weights.values() if torch.is_tensor(weight)]
    return sizes


def _numbers(values: Any, name: str = "") -> list[tuple[str, float]]:
    if isinstance(values, dict):
        return [number for key, value in values.items() for number in _numbers(value, str(key))]
    return [(name, values)] if isinstance(values, int | float) else []
