"""From a run's settings to verl's configuration.

verl's own files say what there is; a preset and the command line say what differs. A setting that the run and verl both
have has one value: whichever name it was given by, the other follows, and two different values are refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire.tools.paths import IMPORT_PATH
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.tracking import FOLDER, TRACKERS, wandb_environment
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import check_type, setting_types, unknown
from groundwire.train.config.verl_presets import BASE, PRESETS, SHARED
from groundwire.train.policy.tool_parsers import FORMATS

if TYPE_CHECKING:
    from groundwire.train.config.run_config import RunConfig

__all__ = ["INSTALL", "compose", "keys", "on_npu", "parse_overrides", "run_settings", "values", "without_twins"]

INSTALL = "uv pip install -e '.[verl]' --override docs/verl-overrides.txt in a clone (docs/verl.md, also for pip)"
"""What to do where verl is missing; the name on the package index is somebody else's."""

_RUN_NAMES = {key: name for name, key in SHARED.items()}
_SAMPLERS = {"sync": "SyncSampler", "colocate_async": "AsyncSampler", "separate_async": "AsyncSampler"}
_OURS = ("algorithm.adv_estimator", "algorithm.filter_groups.enable", "trainer.use_v1")
_LOGGER = "trainer.logger"
_MODE = "trainer.v1.trainer_mode"
_UPDATES = "trainer.v1.separate_async.parameter_sync_step"
_TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_EPOCHS = "trainer.total_epochs"
_RUNTIME_ENV = "+ray_kwargs.ray_init.runtime_env.env_vars."


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """``key=value`` arguments as a dictionary; values are JSON where they can be read as such, else text."""
    overrides: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.strip("+~"):
            raise ConfigError(f"{argument!r} is not key=value, e.g. learning_rate=1e-5")
        if key in overrides:
            raise ConfigError(f"{key} is given twice")
        overrides[key] = _read(text)
    return overrides


def _read(text: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except ValueError:
        if text.startswith("[") and text.endswith("]"):  # [console,wandb], as Hydra's command line has it
            return [_read(part.strip()) for part in text[1:-1].split(",")]
        return text


def run_settings(preset: str, given: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The run's settings (names of :class:`RunConfig`) of ``preset``, with what was given under either name.

    Raises :class:`ConfigError` where both names were given with different values.
    """
    settings = {_RUN_NAMES.get(name, name): value for name, value in PRESETS[preset].items()}
    settings = {name: value for name, value in settings.items() if "." not in name}
    if given.get("external_store_address") is not None:
        settings["runner_processes"] = 0  # a preset's belong to a store that lives with the run
    settings |= {name: value for name, value in given.items() if value is not None}
    types = setting_types()
    for key, said in overrides.items():
        name = _RUN_NAMES.get(key.lstrip("+"))
        if name is None:
            continue
        value = 0 if said is None and name == "steps" else said  # None: as many as the epochs have
        check_type(key, value, types[name])
        if given.get(name) not in (None, value):
            raise ConfigError(f"{key}={value} but {name} is {given[name]}: they are one setting, give it once")
        settings[name] = value
    if (logger := overrides.get(_LOGGER)) is not None:
        loggers = [logger] if isinstance(logger, str) else list(logger)
        named = [name for name in loggers if name in TRACKERS]
        if given.get("track") and set(given["track"]) != set(named):
            raise ConfigError(
                f"{_LOGGER}={logger} but --track {','.join(given['track'])}: they are one setting, give it once"
            )
        settings["track"] = named
    return settings


def without_twins(stored: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings without those that ``changed`` gives by the other of their two names."""
    overrides = {key.lstrip("+") for key in changed.get("verl") or {}}
    names = {_RUN_NAMES[key] for key in overrides & _RUN_NAMES.keys()} | ({"track"} if _LOGGER in overrides else set())
    kept = {name: value for name, value in stored.items() if name not in names}
    twins = {SHARED[name] for name in changed.keys() & SHARED.keys()} | ({_LOGGER} if "track" in changed else set())
    kept["verl"] = {key: value for key, value in (stored.get("verl") or {}).items() if key.lstrip("+") not in twins}
    return kept


def values(
    config: RunConfig,
    *,
    run_dir: str = "RUN_DIR",
    model: str | None = None,
    n_gpus: int = 1,
    epoch_steps: int | None = None,
) -> dict[str, Any]:
    """verl's keys with the values that a run gives them; a leading ``+`` marks keys that verl's files do not have.

    ``model`` is where the model's files are, ``epoch_steps`` the steps of one pass over the training tasks.
    """
    overrides = _overrides(config)
    plain = {key.lstrip("+"): value for key, value in overrides.items()}
    mode = plain.get(_MODE, BASE[_MODE])
    # separate_async takes a batch apart itself: one mini-batch for each local update between two weight transfers.
    updates = plain.get(_UPDATES, 4)
    _check(config, plain, mode, updates)
    mini = max(1, config.tasks_per_step // (updates if mode == "separate_async" else config.minibatches))
    chosen: dict[str, Any] = {
        **BASE,
        **{key: getattr(config, name) for name, key in SHARED.items()},
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": config.val_temperature > 0,
        "actor_rollout_ref.rollout.multi_turn.max_user_turns": config.max_turns,
        "data.max_prompt_length": config.max_model_len - config.max_tokens,
        "data.train_files": f"{run_dir}/tasks/train.parquet",
        "data.val_files": f"{run_dir}/tasks/validation.parquet",
        _LOGGER: [*BASE[_LOGGER], *config.track],
        "trainer.default_local_dir": f"{run_dir}/checkpoints",
        "trainer.experiment_name": Path(run_dir).name,
        "trainer.n_gpus_per_node": n_gpus,
        _TOKENS: max(BASE[_TOKENS], config.max_model_len),
    }
    if model is not None:
        chosen[SHARED["model"]] = model
    if not on_npu(config) and importlib.util.find_spec("flash_attn") is None:
        chosen["actor_rollout_ref.model.use_remove_padding"] = False
        # Without flash-attn's kernel verl takes logprobs token by token in Python: 18 s of 25 at 125,000 tokens a step.
        chosen["actor_rollout_ref.model.use_fused_kernels"] = True
        chosen["+actor_rollout_ref.model.override_config.attn_implementation"] = "sdpa"
    if config.credit == "discount":
        chosen["algorithm.adv_estimator"] = "groundwire_discount"
    chosen |= overrides
    chosen[_LOGGER] = _with_file(chosen[_LOGGER])
    if config.steps == 0:
        epochs = chosen[_EPOCHS]
        chosen[SHARED["steps"]] = None if epoch_steps is None else max(1, epochs * epoch_steps)
    elif _EPOCHS not in config.verl:
        # A preset's are for its own steps, and verl stops at the first of the two.
        chosen[_EPOCHS] = BASE[_EPOCHS]
    chosen["trainer.v1.sampler.custom_sampler.name"] = _SAMPLERS[mode]
    environment = _environment(run_dir, wandb="wandb" in config.track)
    chosen |= {f"{_RUNTIME_ENV}{name}": value for name, value in environment.items()}
    chosen["+groundwire"] = {"run_dir": run_dir, "config": config.to_dict()}
    return chosen


def _overrides(config: RunConfig) -> dict[str, Any]:
    """verl's own settings, the preset's and then the given ones, without those that the run has, too."""
    preset = {key: value for key, value in PRESETS[config.config].items() if "." in key}
    return {key: value for key, value in {**preset, **config.verl}.items() if key.lstrip("+") not in _RUN_NAMES}


def on_npu(config: RunConfig) -> bool:
    """Whether it trains on Ascend, which has kernels of its own."""
    overrides = _overrides(config)
    return bool(overrides.get("+trainer.device", overrides.get("trainer.device")) == "npu")


def _with_file(logger: Any) -> list[str]:
    """``metrics.jsonl`` is made of what verl's logger ``file`` writes."""
    named = [logger] if isinstance(logger, str) else list(logger)
    return named if "file" in named else [*named, "file"]


def _check(config: RunConfig, overrides: Mapping[str, Any], mode: str, updates: Any) -> None:
    for key in overrides:
        if key in _OURS:
            raise ConfigError(f"{key} cannot be changed: the rollouts are built around it (see --credit)")
        if held := next((shared for shared in (*_RUN_NAMES, *_OURS) if shared.startswith(f"{key}.")), None):
            raise ConfigError(f"{key} is a whole section, with {held} in it: give its settings one by one")
    if mode not in _SAMPLERS:
        raise ConfigError(f"{_MODE} is {mode!r}; it is one of {', '.join(_SAMPLERS)}")
    if not isinstance(updates, int) or updates < 1:
        raise ConfigError(f"{_UPDATES} is {updates!r}; it must be a whole number of at least 1")
    if mode == "separate_async" and config.tasks_per_step % updates:
        raise ConfigError(
            f"tasks_per_step is {config.tasks_per_step} and {_UPDATES} {updates}: separate_async takes a batch apart "
            "into that many equal parts"
        )
    room = config.max_model_len - config.max_tokens
    if room < 1:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} and max_tokens {config.max_tokens}: no room for a prompt"
        )
    for key, value, why in (
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns", config.max_turns, "max_turns, for the agent and verl"),
        ("data.max_prompt_length", room, "max_model_len less max_tokens"),
    ):
        if overrides.get(key, value) != value:
            raise ConfigError(f"{key}={overrides[key]}: it is {why}, here {value}; change those")
    tokens = overrides.get(_TOKENS, config.max_model_len)
    if not isinstance(tokens, int) or tokens < config.max_model_len:
        raise ConfigError(
            f"{_TOKENS} is {tokens!r}, less than one trajectory of max_model_len {config.max_model_len} tokens"
        )
    parser = overrides.get("actor_rollout_ref.rollout.multi_turn.format")
    if parser is not None and parser not in FORMATS:
        raise ConfigError(f"multi_turn.format is {parser!r}; tool calls are read as {', '.join(FORMATS)}")


def _environment(run_dir: str, *, wandb: bool) -> dict[str, str]:
    """What verl's processes are to find in their environment."""
    path = [str(IMPORT_PATH), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    wanted = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "VERL_FILE_LOGGER_PATH": f"{run_dir}/verl.jsonl",
        "TENSORBOARD_DIR": f"{run_dir}/{FOLDER}",
        # vLLM's first start would otherwise compile kernels for minutes.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **(wandb_environment(RunDir(Path(run_dir))) if wandb else {}),
    }
    ours = ("PYTHONPATH", "VERL_FILE_LOGGER_PATH")
    kept = {name: os.environ[name] for name in wanted if name in os.environ and name not in ours}
    return {**wanted, **kept}


def schema_folder() -> Path:
    """Where verl's configuration files are, found without importing verl. Raises :class:`ConfigError`."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"verl is not installed: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"


def compose(chosen: Mapping[str, Any]) -> Any:
    """verl's whole configuration with ``chosen`` in it, as an OmegaConf ``DictConfig``.

    Keys without a dot choose one of Hydra's groups (``model_engine=megatron``). Raises :class:`ConfigError` for a key
    that verl does not have.
    """
    folder = schema_folder()
    try:
        from hydra import compose as hydra_compose
        from hydra import initialize_config_dir
        from hydra.errors import HydraException
        from omegaconf import OmegaConf, open_dict
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: {INSTALL}") from error

    groups = [f"{key}={value}" for key, value in chosen.items() if "." not in key and not key.startswith("+")]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = hydra_compose("ppo_trainer", overrides=groups)
    except HydraException as error:
        why = str(error).splitlines()[0].rstrip(".")
        hint = next((unknown(name) for name in chosen if f"'{name}'" in why), "")
        raise ConfigError(f"verl cannot be configured with {' '.join(groups)}: {why}{hint}") from error
    known = None
    for key, value in chosen.items():
        if "." not in key and not key.startswith("+"):
            continue
        name = key.lstrip("+")
        if not key.startswith("+"):
            known = known or set(keys(config))
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"write +{name}=… to add it"
                raise ConfigError(f"verl has no setting {name}: {hint}")
        with open_dict(config):
            OmegaConf.update(config, name, value, merge=False, force_add=True)
    return config


def keys(config: Any, prefix: str = "") -> list[str]:
    """Every dotted key of a composed configuration, sections included; interpolations are left alone."""
    from omegaconf import DictConfig

    found: list[str] = []
    for key in config:
        name = f"{prefix}{key}"
        found.append(name)
        child = config._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            found += keys(child, f"{name}.")
    return found
