"""Models of the model hub: whether one can be had, and its download."""

from __future__ import annotations

from pathlib import Path

from groundwire.train.config.errors import ConfigError

__all__ = ["check_hub", "download"]

_HUB_TIMEOUT_S = 10.0
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def download(name: str) -> Path:
    """The folder of the model ``owner/name`` in the hub's cache; it is downloaded if it is not there.

    Raises :class:`ConfigError`.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder
    except (OSError, ValueError):
        pass  # it is not in the cache, or check_hub refuses its name
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
    import httpx
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
    except (OSError, httpx.HTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = f"{not_cached}, and the hub cannot be asked ({reason}){elsewhere}"
    else:
        return
    where = f"{folder.parent} is a folder here without {folder.name}" if is_here else "no such folder"
    raise ConfigError(f"no model {model}: {where}, and {why}")
