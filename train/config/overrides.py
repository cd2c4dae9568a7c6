"""Settings given as options, as ``KEY=VALUE`` and in a file, merged under the names of :class:`RunConfig`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from groundwire.rewards import JudgeSettings
from groundwire.tools.settings import suggestion_for
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig

__all__ = ["flag", "merge_overrides", "not_a_pair", "parse_overrides", "reject_verl_overrides", "with_changes"]

NAMES = {name: field for name, field in RunConfig.names().items() if field not in ("judge", "verl")}
"""Every name of a setting that has one plain value, and its field."""


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """``key=value`` arguments as a dictionary; values are JSON where they can be read as such, else text."""
    overrides: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.strip("+~"):
            raise ConfigError(not_a_pair(argument))
        if key in overrides:
            raise ConfigError(f"{key} is given twice")
        overrides[key] = _parse_value(text)
    return overrides


def not_a_pair(argument: str) -> str:
    """The message for an argument without a key or a value; of a long one, which may be a secret, the beginning."""
    shown = f"{argument[:20]}..." if len(argument) > 20 else argument
    return f"{shown!r} is not key=value, e.g. learning_rate=1e-5"


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


def merge_overrides(options: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, checked, by their fields' names: ``options`` (None: not given) and ``overrides``.

    ``judge.NAME`` is a setting of the judge. All other keys are verl's settings, returned under ``verl``.
    Raises :class:`ConfigError` for a wrong value, and if an option and an override differ.
    """
    given = {name: value for name, value in options.items() if value is not None and name != "judge"}
    given = {name: RunConfig.check_value(name, value) for name, value in given.items()}
    judge, verl = dict(options.get("judge") or {}), {}
    for key, value in overrides.items():
        if key.startswith("judge."):
            _set(judge, key.removeprefix("judge."), JudgeSettings, key, value)
        elif key in NAMES:
            _set(given, NAMES[key], RunConfig, key, value)
        else:
            verl[key] = value
    return given | ({"judge": judge} if judge else {}) | ({"verl": verl} if verl else {})


def with_changes(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with ``changes``; the tables ``judge`` and ``verl`` are merged key by key."""
    tables = {name: {**settings.get(name, {}), **changes[name]} for name in ("judge", "verl") if name in changes}
    return {**settings, **changes, **tables}


def _set(given: dict[str, Any], name: str, record: type[RunConfig] | type[JudgeSettings], key: str, value: Any) -> None:
    name = record.names().get(name, name)
    value = record.check_value(name, value, shown_as=key)
    if given.get(name, value) != value:
        option = f"--judge {name}={given[name]}" if record is JudgeSettings else f"{flag(name)} {given[name]}"
        raise ConfigError(f"{key}={value} but {option}: they are one setting, give it once")
    given[name] = value


def flag(name: str) -> str:
    """The option of a setting."""
    return f"--{name.replace('_', '-')}"


def reject_verl_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for the first key: the local trainer has no settings of verl's."""
    for key in overrides:
        if "." in key:
            raise ConfigError(f"{key}=… is a setting of verl's: it needs --trainer verl")
        raise ConfigError(f"unknown setting {key}{suggestion_for(key, NAMES)}")  # the value may be a secret
