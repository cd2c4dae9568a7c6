"""The named prompts of a run's agent, from the file that ``--prompts`` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire.tools.files import read_json, shorten_repr
from groundwire.tools.text import valid_texts
from groundwire.train.config.errors import ConfigError

__all__ = ["read_prompts"]

_MAX_CHARS = 200_000


def read_prompts(value: Any) -> Any:
    """The prompts by their names: ``value``, or the JSON object in the file of this name.

    Raises :class:`ConfigError`, which names the file and the prompt.
    """
    if not isinstance(value, str | Path):
        return valid_texts(value)
    try:
        prompts = read_json(Path(value))
    except OSError as error:
        raise ConfigError(f"prompts: {value} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"prompts: {value} is not valid JSON: {error}") from error
    if not isinstance(prompts, Mapping) or not prompts:
        raise ConfigError(f'prompts: {value} must hold texts by their names, e.g. {{"system": "..."}}')
    for name, text in prompts.items():
        if not isinstance(text, str) or len(text) > _MAX_CHARS:
            raise ConfigError(
                f"prompts: {value}: {name[:60]} is {shorten_repr(text)}; it must be a text of at most {_MAX_CHARS:,} "
                "characters"
            )
    return dict(prompts)
