"""From a preset and the given settings to the whole record of a run, and how it differs from the published recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import SUFFIXES, read_settings, with_changes
from groundwire.train.config.presets import GONE, PRESETS, RECIPE, VERL_PRESETS
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_names import LOGGER, with_run_names


def resolve(preset: str, **changes: Any) -> RunConfig:
    """The defaults, then the preset, then the ``changes`` (``None`` is none). Raises :class:`ConfigError`."""
    chosen = {name: value for name, value in changes.items() if value is not None}
    verl = chosen.get("trainer") == "verl"
    settings = preset_settings(preset, "verl" if verl else "local")
    if chosen.get("agent") is not None:
        settings["backend"] = "custom"  # the framework is found from the agent
        settings.pop("agent_options", None)  # a preset's are of the SQL agents
    usual = {"backend": "langgraph", "domain": "spider"}
    if chosen.get("agent") or any(chosen.get(name, value) != value for name, value in usual.items()):
        settings.pop("agent_match", None)  # a preset's names the agents of the SQL graph
    chosen = with_run_names(chosen, verl=verl)
    return RunConfig(**{**with_changes(settings, chosen), "config": preset})


def resolve_again(stored: dict[str, Any], changed: dict[str, Any]) -> RunConfig:
    """The ``stored`` settings of a run with changes. Raises :class:`ConfigError`."""
    if stored["trainer"] == "verl":
        changed = with_run_names(changed, verl=True)
    if "track" in changed:  # it is verl's logger, too
        stored.get("verl", {}).pop(LOGGER, None)
    return resolve(stored["config"], **with_changes(stored, changed))


def preset_settings(preset: str, trainer: str) -> dict[str, Any]:
    """The settings that a preset changes, without verl's own. Raises :class:`ConfigError` for an unknown preset."""
    presets = VERL_PRESETS if trainer == "verl" else PRESETS
    if preset in GONE:
        raise ConfigError(GONE[preset])
    if preset not in presets:
        other = f"; {preset!r} is one of --trainer verl" if preset in VERL_PRESETS else ""
        known = f"{', '.join(sorted(presets))}, or a file ({', '.join(SUFFIXES)})"
        raise ConfigError(f"unknown config {preset!r}; known: {known}{other}")
    return {name: value for name, value in presets[preset].items() if "." not in name}


def with_file(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` with those of the file that its ``config`` names, if it names one; its own win."""
    file = Path(settings.get("config") or "")
    if file.suffix not in SUFFIXES:
        return settings
    of_file = read_settings(file)
    return {**with_changes(of_file, settings), "config": of_file.get("config")}


_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_REASONS = {
    "algorithm.adv_estimator": "the same estimator, over rollouts in place of rows",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "batches are filled by tokens (use_dynamic_bsz)",
    f"{_ROLLOUT}.multi_turn.format": "the model's own format of tool calls",
    "trainer.n_gpus_per_node": "all GPUs of this machine",
    "trainer.project_name": "the name of this project",
    "track": "wandb if it is installed and logged in",
}
_VERLS_OWN = {
    f"{_MODEL}.use_remove_padding": True,
    f"{_MODEL}.enable_gradient_checkpointing": True,
    f"{_ACTOR}.clip_ratio_low": 0.2,
}
"""verl's defaults, where a run gives no value."""


def differences(config: RunConfig, flat: Mapping[str, Any] | None = None) -> list[str]:
    """One line for each setting that differs from the recipe; ``flat`` are verl's, by dotted names."""
    lines = []
    for name, published in RECIPE.items():
        if name.startswith("agent_options."):
            own = config.agent_options.get(name.removeprefix("agent_options."), "the agent's default")
        elif "." not in name:
            own = getattr(config, name)
        elif flat is None:
            continue
        else:
            own = flat.get(name, flat.get(f"+{name}", _VERLS_OWN.get(name)))
        if own != published:
            reason = f" ({_REASONS[name]})" if name in _REASONS else ""
            lines.append(f"{name}: {own}, published {published}{reason}")
    return lines
