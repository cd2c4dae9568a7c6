"""What the files in a model's folder say without its weights. Only the tokenizer is loaded; torch is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groundwire.tools.files import read_bytes, read_json
from groundwire.train.config.errors import ConfigError
from groundwire.train.policy.errors import UnsupportedModelError

_UNSCALED = ("default", "llama3")
"""Kinds of rotary embeddings whose ``max_position_embeddings`` is the length with scaling."""


def read_chat_templates(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The folder's chat templates by their names, of which ``default`` is that of messages without tools; and the
    variables of all: the names of special tokens. Raises :class:`ConfigError`.
    """
    file = folder / "tokenizer_config.json"
    settings = _read(file, _read_object) if file.is_file() else {}
    stored = settings.get("chat_template") or ""
    if not isinstance(stored, list):
        stored = [{"name": "default", "template": stored}]
    templates = {
        str(entry.get("name")): str(entry.get("template") or "") for entry in stored if isinstance(entry, dict)
    }
    for file in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if file.is_file():
            name = "default" if file.parent == folder else file.stem
            templates[name] = _read(file, lambda file: read_bytes(file).decode())
    tokens = {str(name): value.get("content") if isinstance(value, dict) else value for name, value in settings.items()}
    variables = {name: token for name, token in tokens.items() if name.endswith("_token") and isinstance(token, str)}
    return templates, variables


def check_config(folder: Path) -> None:
    """Raise :class:`ConfigError` for a folder without a model's settings, :class:`UnsupportedModelError` for one with
    quantized weights.
    """
    config = _read(folder / "config.json", _read_object)
    if config.get("model_type") is None:
        raise ConfigError(
            f"no model in {folder}: its config.json has no model_type; give a folder saved by transformers, such as a "
            "checkpoint of a run"
        )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UnsupportedModelError(
            f"the weights in {folder} are quantized ({method}), and an update needs plain ones: use the model that "
            "they were made from, or a GGUF file of it, which is converted"
        )


def read_context_length(folder: Path) -> int | None:
    """The most tokens of prompt and reply together; None if the file does not say it. Raises :class:`ConfigError`."""
    config = _read(folder / "config.json", _read_object)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "unknown"
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) and kind in _UNSCALED else None


def _read_object(file: Path) -> dict[str, Any]:
    value = read_json(file)
    if not isinstance(value, dict):
        raise ValueError("it holds no settings")
    return value


def _read(file: Path, read: Any) -> Any:
    try:
        return read(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is damaged: {error}; copy the model again") from error


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder. Raises what transformers raises."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer("a word", add_special_tokens=False)  # with wrong settings it fails at its first use
    return tokenizer
