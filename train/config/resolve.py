"""From a preset and the given settings to the whole record of a run."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import reject_verl_overrides
from groundwire.train.config.presets import PRESETS
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_names import run_settings
from groundwire.train.config.verl_presets import VERL_PRESETS

__all__ = ["resolve"]


def resolve(preset: str, **given: Any) -> RunConfig:
    """The defaults, then the preset, then what was given (``None`` is not given). Raises :class:`ConfigError`."""
    verl = given.get("trainer") == "verl"
    presets = VERL_PRESETS if verl else PRESETS
    if preset not in presets:
        other = "" if verl or preset not in VERL_PRESETS else f"; {preset!r} is one of --trainer verl"
        raise ConfigError(f"unknown config {preset!r}; known: {', '.join(sorted(presets))}{other}")
    chosen = {name: value for name, value in given.items() if value is not None}
    if not verl:
        reject_verl_overrides(chosen.get("verl") or {})
    chosen = run_settings(preset, chosen, chosen.get("verl") or {}) if verl else {**PRESETS[preset], **chosen}
    known = {field.name for field in fields(RunConfig)}
    if unknown := sorted(set(chosen) - known):
        raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return replace(RunConfig(), config=preset, **chosen)
