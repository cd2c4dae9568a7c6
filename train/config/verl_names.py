"""Settings that the run and verl both have: one setting with two names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import check_type, setting_types
from groundwire.train.config.run_config import TRACKERS
from groundwire.train.config.verl_presets import VERL_PRESETS

__all__ = ["LOGGER", "RUN_NAMES", "SHARED", "drop_aliases", "run_settings"]

SHARED: dict[str, str] = {
    "model": "actor_rollout_ref.model.path",
    "steps": "trainer.total_training_steps",
    "tasks_per_step": "data.train_batch_size",
    "group_size": "actor_rollout_ref.rollout.n",
    "max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "max_tokens": "data.max_response_length",
    "max_model_len": "actor_rollout_ref.rollout.max_model_len",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "val_temperature": "actor_rollout_ref.rollout.val_kwargs.temperature",
    "val_every": "trainer.test_freq",
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "clip_low": "actor_rollout_ref.actor.clip_ratio_low",
    "clip_high": "actor_rollout_ref.actor.clip_ratio_high",
    "checkpoint_every": "trainer.save_freq",
    "seed": "data.seed",
}
"""Settings that the run and verl both have, and verl's name for each. They are one setting with two names."""

RUN_NAMES = {key: name for name, key in SHARED.items()}
LOGGER = "trainer.logger"


def run_settings(preset: str, given: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The run's settings (names of :class:`RunConfig`) of ``preset``, with what was given under either name.

    Raises :class:`ConfigError` where both names were given with different values.
    """
    settings = {RUN_NAMES.get(name, name): value for name, value in VERL_PRESETS[preset].items()}
    settings = {name: value for name, value in settings.items() if "." not in name}
    if given.get("external_store_address") is not None:
        settings["runner_processes"] = 0  # a preset's belong to a store that lives with the run
    settings |= {name: value for name, value in given.items() if value is not None}
    types = setting_types()
    for key, said in overrides.items():
        name = RUN_NAMES.get(key.lstrip("+"))
        if name is None:
            continue
        value = 0 if said is None and name == "steps" else said  # None: as many as the epochs have
        check_type(key, value, types[name])
        if given.get(name) not in (None, value):
            raise ConfigError(f"{key}={value} but {name} is {given[name]}: they are one setting, give it once")
        settings[name] = value
    if (logger := overrides.get(LOGGER)) is not None:
        loggers = [logger] if isinstance(logger, str) else list(logger)
        named = [name for name in loggers if name in TRACKERS]
        if given.get("track") and set(given["track"]) != set(named):
            raise ConfigError(
                f"{LOGGER}={logger} but --track {','.join(given['track'])}: they are one setting, give it once"
            )
        settings["track"] = named
    return settings


def drop_aliases(stored: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings without those that ``changed`` gives by the other of their two names."""
    overrides = {key.lstrip("+") for key in changed.get("verl") or {}}
    names = {RUN_NAMES[key] for key in overrides & RUN_NAMES.keys()} | ({"track"} if LOGGER in overrides else set())
    kept = {name: value for name, value in stored.items() if name not in names}
    twins = {SHARED[name] for name in changed.keys() & SHARED.keys()} | ({LOGGER} if "track" in changed else set())
    kept["verl"] = {key: value for key, value in (stored.get("verl") or {}).items() if key.lstrip("+") not in twins}
    return kept
