"""Settings that the run and verl share, under two names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groundwire.tools.settings import suggestion_for
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import NAMES
from groundwire.train.config.run_config import TRACKERS, RunConfig

ENGINE_VENDOR = "groundwire"
"""The name under which verl finds the engine for shared prefixes. Any other gives verl's own."""

SHARED_PREFIXES = "groundwire.train.verl.shared_prefixes.engine"
"""The module that verl's workers import (``external_lib``) to compute each shared prefix once."""

OWN_ESTIMATOR = "groundwire"
"""The advantage estimator with which verl takes over the advantages that :mod:`groundwire.train.verl` computes."""

SHARED: dict[str, str] = {
    "model": "actor_rollout_ref.model.path",
    "steps": "trainer.total_training_steps",
    "tasks_per_step": "data.train_batch_size",
    "group_size": "actor_rollout_ref.rollout.n",
    "max_tokens": "data.max_response_length",
    "max_model_len": "actor_rollout_ref.rollout.max_model_len",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "val_temperature": "actor_rollout_ref.rollout.val_kwargs.temperature",
    "val_every": "trainer.test_freq",
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "clip_high": "actor_rollout_ref.actor.clip_ratio_high",
    "entropy_coef": "actor_rollout_ref.actor.entropy_coeff",
    "warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "lora_rank": "actor_rollout_ref.model.lora_rank",
    "checkpoint_every": "trainer.save_freq",
    "seed": "data.seed",
}
"""Settings that the run and verl share: the run's name and verl's name."""

_UNSET = {"steps": (None,), "warmup_steps": (None, -1)}
"""verl's values for which the run's setting is 0: as many steps as its epochs have, and no warm-up of its own."""

RUN_NAMES = {key: name for name, key in SHARED.items()}
LOGGER = "trainer.logger"
ESTIMATOR = "algorithm.adv_estimator"
PORT = "agentlightning.port"
_ACTOR = "actor_rollout_ref.actor"
MINIBATCH = f"{_ACTOR}.ppo_mini_batch_size"


def loss_keys(config: RunConfig) -> dict[str, tuple[Any, str]]:
    """verl's keys for the settings of the loss that differ from their defaults: the value, and the setting's name.

    Raises :class:`ConfigError` for a schedule that verl does not have.
    """
    keys: dict[str, tuple[Any, str]] = {}
    if config.loss != "token-mean":
        mode = "seq-mean-token-sum-norm" if config.loss == "dr-grpo" else "seq-mean-token-mean"
        keys[f"{_ACTOR}.loss_agg_mode"] = (mode, "loss")
    if config.loss == "dr-grpo":
        keys[f"{_ACTOR}.loss_scale_factor"] = (config.max_tokens, "loss")
        keys["algorithm.norm_adv_by_std_in_grpo"] = (False, "loss")
    if config.loss == "gspo":
        keys[f"{_ACTOR}.policy_loss.loss_mode"] = ("gspo", "loss")
    if config.kl_coef:
        values = {"use_kl_loss": True, "kl_loss_coef": config.kl_coef, "kl_loss_type": "low_var_kl"}
        keys |= {f"{_ACTOR}.{name}": (value, "kl_coef") for name, value in values.items()}
    if config.lr_schedule == "linear":
        raise ConfigError("lr_schedule is 'linear', which verl does not have; use constant or cosine")
    if config.lr_schedule == "cosine":
        keys[f"{_ACTOR}.optim.lr_scheduler_type"] = ("cosine", "lr_schedule")
    return keys


def with_run_names(chosen: Mapping[str, Any], *, verl: bool) -> dict[str, Any]:
    """The settings ``chosen``, with those in its ``verl`` that the run has too under the run's names.

    Without ``verl``, for another trainer, nothing else may be left: GRPO and its loggers mean what they mean for verl.
    Raises :class:`ConfigError` for other keys, for files with tasks, which a domain reads, and if the two names of a
    setting are given with different values.
    """
    settings, keys = dict(chosen), dict(chosen.get("verl") or {})
    if files := keys.keys() & {"data.train_files", "data.val_files"}:
        raise ConfigError(
            f"{max(files)} cannot be set: give the folder of its files with --data-dir (or SPIDER_DATA_DIR); training "
            "reads train_spider.parquet there, and validation test_dev_500.parquet or test_dev.parquet"
        )
    if (port := keys.pop(PORT, None)) is not None:
        host = chosen.get("proxy_host") or RunConfig.model_fields["proxy_host"].default
        if ":" in host and host.rpartition(":")[2] != str(port):
            raise ConfigError(f"{PORT}={port} but proxy_host is {host}: they are one setting")
        settings["proxy_host"] = RunConfig.check_value("proxy_host", f"{host.partition(':')[0]}:{port}", shown_as=PORT)
    if (logger := keys.get(LOGGER)) is not None:
        names = [logger] if isinstance(logger, str) else logger
        settings["track"] = [name for name in names if name in TRACKERS]
        if chosen.get("track") and {*chosen["track"]} != {*settings["track"]}:
            track = ",".join(chosen["track"])
            raise ConfigError(f"{LOGGER}={logger} but --track {track}: they are one setting, give it once")
    if not verl:
        keys.pop(LOGGER, None)
        if (estimator := keys.pop(ESTIMATOR, "grpo")) != "grpo":
            raise ConfigError(f"{ESTIMATOR}={estimator}: the local trainer has grpo alone; --trainer verl has others")
        for key in keys:  # without their values, which may be secrets
            if "." in key:
                raise ConfigError(f"{key}=… is a setting of verl's: it needs --trainer verl")
            raise ConfigError(f"unknown setting {key}{suggestion_for(key, NAMES)}")
    for key in [*keys]:
        if name := RUN_NAMES.get(key.lstrip("+")):
            value = keys.pop(key)
            unset = value in _UNSET.get(name, ())
            settings[name] = RunConfig.check_value(name, 0 if unset else value, shown_as=key)
            if chosen.get(name) not in (None, settings[name]):
                raise ConfigError(f"{key}={value} but {name} is {chosen[name]}: they are one setting, give it once")
    return {**settings, "verl": keys}


COMPUTED, UPDATE_FLOPS, TRAINING_GPUS = "tokens_computed_total", "update_flops_total", "training_gpus_max"
"""What our engine logs of an update, under ``actor/``. verl adds up the updates of a step by names with ``total``."""
