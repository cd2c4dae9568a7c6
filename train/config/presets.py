"""The presets of ``--config``, of both trainers: those of ``presets.toml``, which also says what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groundwire.tools.files import parse_toml

_BY_SIZE = "by size"
"""The learning rate of a preset that takes the one for the model's size."""
_TABLES: dict[str, dict[str, dict[str, Any]]] = parse_toml(Path(__file__).with_name("presets.toml").read_text("utf-8"))


def _preset(trainer: str, name: str) -> dict[str, Any]:
    preset = dict(_TABLES[trainer][name])
    if (base := preset.pop("extends", None)) is not None:
        preset = {**(_TABLES["parts"].get(base) or _preset(trainer, base)), **preset}
    return {key: None if value == _BY_SIZE else value for key, value in preset.items()}


PRESETS = {name: _preset("local", name) for name in _TABLES["local"]}
"""What each preset of the local trainer changes in the defaults of :class:`.run_config.RunConfig`."""
VERL_PRESETS = {name: _preset("verl", name) for name in _TABLES["verl"]}
"""The same of ``--trainer verl``, with settings of verl's own."""
BASE: dict[str, Any] = _TABLES["parts"]["verl"]
"""verl's own settings that all runs with verl have."""
_OWN = ("agent_options", "rollout_timeout_s")
"""Settings of the preset of the recipe that it does not have, or not all of."""
RECIPE: dict[str, Any] = {
    **{name: value for name, value in VERL_PRESETS["qwen"].items() if name not in _OWN},
    **_TABLES["parts"]["recipe"],
}
"""The published recipe of the SQL agent, settings of the run and of verl's own."""

GONE = {"npu": "the preset npu is gone, as it never ran on an Ascend device; docs/published.md has its settings"}
"""What to do without a preset of 0.1.0."""
