"""A model's folder: saves it, and checks it before transformers reads it.

A damaged file must not fill the memory or wait for ever.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from groundwire.tools.files import give_usual_mode, read_bytes, read_json, shorten_repr
from groundwire.tools.secrets import say

_TEXT_PART = {
    r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head)": "model.",
    r"^(language_model|text_model)\.lm_head": "lm_head",
}
"""The names of a language model's tensors in a model that has other parts, and by itself."""
_MAX_GROWTH = 16  # times the numbers of its file that a model may have: 4 bits of a weight, untied embeddings


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
        # Of those names one is no number of layers.
        if name.endswith(("layer", "layers")) and name != "max_window_layers" and value > len(stored):
            raise ValueError(f"config.json has {name} {value:g}, and the files of weights have {len(stored)} tensors")
    # config.json may name an attention that this machine does not have.
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager").get_text_config()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers has no causal language model of the model_type {config.model_type!r}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    numbers = sum(tensor.numel() for tensor in itertools.chain(model.parameters(), model.buffers()))
    if numbers > _MAX_GROWTH * sum(stored):
        raise ValueError(f"config.json describes a model of {numbers:,} numbers, and its weights are {sum(stored):,}")


def read_model(folder: Path) -> Any:
    """The causal language model in a folder, float32; of one that also reads images or sound, its language model.

    Raises ``ValueError`` if tensors are missing, and what transformers raises.
    """
    options: dict[str, Any] = {"attn_implementation": "eager", "trust_remote_code": False}
    whole = AutoConfig.from_pretrained(folder, **options)
    options |= {"config": whole.get_text_config(), "dtype": torch.float32, "output_loading_info": True}
    if is_part := options["config"] is not whole:
        options["key_mapping"] = _TEXT_PART
    with quiet() if is_part else nullcontext():
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    if missing := sorted(info["missing_keys"]):  # tied weights are not among them
        raise ValueError(f"it has no tensor for {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}")
    if is_part:
        model.__dict__.pop("_weight_conversions", None)  # else it would be saved under the names in the whole model
        parts = f"its language model, {type(model).__name__}, is read alone, without what reads images or sound"
        say(f"model: {folder.name} is a {whole.model_type}: {parts}", err=True)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return model


@contextmanager
def quiet() -> Any:
    """Without the bars of a GGUF file's reader, which cannot be switched off, and the table of tensors."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)


def save_policy(model: Any, tokenizer: Any, path: str | Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write ``model`` (safetensors) and ``tokenizer`` into the folder ``path``, which is created if needed.

    ``weights``, by their names in the model, are written in place of the model's own.
    """
    logging.disable_progress_bar()
    model.save_pretrained(path, state_dict=weights)
    tokenizer.model_max_length = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    tokenizer.save_pretrained(path)
    # transformers 5 would write a class that transformers 4 cannot load; both know this one.
    config = Path(path) / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in Path(path).glob("*.safetensors"):
        give_usual_mode(file)


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
