"""What the JSON files in a model's folder say of the model. Nothing is loaded, and no library is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groundwire.tools.files import read_bytes, read_json
from groundwire.train.config.errors import ConfigError
from groundwire.train.policy.errors import UnsupportedModelError

SUPPORTED = ("llama", "qwen2", "qwen3")
"""The values of a config's ``model_type`` that the embedded engine computes; a GGUF file has the same names."""

_UNSCALED = ("default", "llama3")
"""Kinds of rotary embeddings whose ``max_position_embeddings`` is the length with scaling."""


def read_chat_template(folder: Path) -> str:
    """The text of the folder's chat templates; empty if there are none. Raises :class:`ConfigError`."""
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    texts = [_read(file, lambda file: read_bytes(file).decode()) for file in files if file.is_file()]
    file = folder / "tokenizer_config.json"
    if file.is_file():
        texts.append(str(_read(file, _read_object).get("chat_template") or ""))
    return "\n".join(filter(None, texts))


def read_default_template(folder: Path) -> tuple[str, dict[str, str]]:
    """The template of messages without tools, empty if there is none, and its variables: the names of special tokens.

    Raises :class:`ConfigError`.
    """
    file = folder / "tokenizer_config.json"
    settings = _read(file, _read_object) if file.is_file() else {}
    tokens = {name: each.get("content") if isinstance(each, dict) else each for name, each in settings.items()}
    variables = {name: each for name, each in tokens.items() if name.endswith("_token") and isinstance(each, str)}
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default") or ""
    if (file := folder / "chat_template.jinja").is_file():
        template = _read(file, lambda file: read_bytes(file).decode())
    return str(template), variables


def check_model_type(folder: Path) -> None:
    """Raise an error unless the embedded engine computes the model, or as :func:`read_context_length`."""
    architecture = _read(folder / "config.json", _read_object).get("model_type")
    if architecture is None:
        raise ConfigError(
            f"no model in {folder}: its config.json has no model_type; give a folder saved by transformers, such as a "
            "checkpoint of a run"
        )
    if architecture not in SUPPORTED:
        raise unsupported(folder, f"its model_type is {str(architecture)!r}")


def unsupported(model: Path | str, problem: str) -> UnsupportedModelError:
    """The error for a model that the embedded engine does not compute."""
    return UnsupportedModelError(
        f"the embedded engine cannot sample from {model}: {problem}, and it computes the decoders "
        f"{', '.join(SUPPORTED)} with full attention; use such a model, or train this one with --trainer verl and "
        "serve it with vLLM"
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
