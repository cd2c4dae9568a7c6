"""``KEY=VALUE`` on the command line: a run's settings by their own names, beside those of verl's.

What has an option of its own is given by that option: a setting has one way in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, get_type_hints

from groundwire.train.config.errors import ConfigError

__all__ = ["by_name", "check_type", "refuse_verls", "setting_types", "unknown"]

_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def setting_types() -> dict[str, Any]:
    """The names of a run's settings and their types."""
    from groundwire.train.config.run_config import RunConfig  # which needs this module for its presets

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


def refuse_verls(overrides: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` where any is left: the local trainer has none of verl's."""
    for key in overrides:
        if "." in key:
            raise ConfigError(f"{key}=… is a setting of verl's: it needs --trainer verl")
        raise ConfigError(f"unknown setting {key}={overrides[key]}{unknown(key)}")


def unknown(key: str) -> str:
    """What else a ``key`` that there is not may have meant, as the end of a sentence."""
    close = get_close_matches(key, setting_types().keys() - {"verl"}, n=3, cutoff=0.7)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return "; python -m train.run --print-config shows all there are"
