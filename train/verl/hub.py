"""Is a model that is no folder here one on the model hub? Asked before Ray starts, which would fail much later."""

from __future__ import annotations

from pathlib import Path

from groundwire.train.config.errors import ConfigError

__all__ = ["check_hub"]

_ANSWER_S = 10.0


def check_hub(model: str) -> None:
    """Raise :class:`ConfigError` where ``owner/name`` is neither in the hub's cache on this machine nor on the hub.

    The hub is asked only for what is not in the cache, and for ten seconds at most.
    """
    import httpx
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
        HfApi().model_info(model, timeout=_ANSWER_S)
    except errors.RepositoryNotFoundError:
        why = "the hub has no such model, or only for those who are logged in (hf auth login)"
    except errors.HFValidationError:
        why = "no model on the hub can have this name"
    except errors.OfflineModeIsEnabled:
        why = f"it is not in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set"
    except (OSError, httpx.HTTPError) as error:
        why = f"it is not in the hub's cache ({constants.HF_HUB_CACHE}), and the hub cannot be asked ({_short(error)})"
    else:
        return
    folder = Path(model)
    here = f"{folder.parent} is a folder here without {folder.name}" if folder.parent.is_dir() else "no such folder"
    raise ConfigError(f"no model {model}: {here}, and {why}")


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
