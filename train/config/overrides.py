"""``KEY=VALUE`` on the command line: a run's settings by their own names, beside those of verl's.

What has an option of its own is given by that option: a setting has one way in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, get_type_hints

from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig

__all__ = ["by_name", "check_type", "parse_overrides", "reject_verl_overrides", "setting_types", "suggestion_for"]

_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """``key=value`` arguments as a dictionary; values are JSON where they can be read as such, else text."""
    overrides: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.strip("+~"):
            raise ConfigError(f"{argument!r} is not key=value, e.g. learning_rate=1e-5")
        if key in overrides:
            raise ConfigError(f"{key} is given twice")
        overrides[key] = _parse_value(text)
    return overrides


def _parse_value(text: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except ValueError:
        if text.startswith("[") and text.endswith("]"):  # [console,wandb], as Hydra's command line has it
            return [_parse_value(part.strip()) for part in text[1:-1].split(",")]
        return text


def setting_types() -> dict[str, Any]:
    """The names of a run's settings and their types."""
    return get_type_hints(RunConfig)


def by_name(overrides: Mapping[str, Any], *, options: Collection[str]) -> dict[str, Any]:
    """The run's own settings among ``overrides``, by their names, and the others under ``verl`` (or None).

    ``options`` are the settings that have an option. Raises :class:`ConfigError` for those, and for a value of the
    wrong kind.
    """
    types = setting_types()
    types.pop("verl")
    ours, others = {}, {}
    for key, value in overrides.items():
        if key not in types:
            others[key] = value
            continue
        if key in options:
            raise ConfigError(f"{key}={value}: give it as the option --{key.replace('_', '-')}")
        check_type(key, value, types[key])
        ours[key] = float(value) if types[key] is float else value
    return {**ours, "verl": others or None}


def check_type(key: str, value: Any, wanted: Any) -> None:
    """Raise :class:`ConfigError` where ``value`` is not of the type ``wanted``; a whole number is a number, too."""
    kinds = {float: (int, float)}.get(wanted, (wanted,) if wanted in _KINDS else None)
    if kinds is None:
        return
    fits = isinstance(value, kinds) and isinstance(value, bool) == (wanted is bool)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{key} is {value!r}; it must be {_KINDS[wanted]}")


def reject_verl_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` where any is left: the local trainer has none of verl's."""
    for key in overrides:
        if "." in key:
            raise ConfigError(f"{key}=… is a setting of verl's: it needs --trainer verl")
        raise ConfigError(f"unknown setting {key}={overrides[key]}{suggestion_for(key)}")


def suggestion_for(key: str) -> str:
    """What else a ``key`` that there is not may have meant, as the end of a sentence."""
    close = get_close_matches(key, setting_types().keys() - {"verl"}, n=3, cutoff=0.7)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return "; python -m train.run --print-config shows all there are"
