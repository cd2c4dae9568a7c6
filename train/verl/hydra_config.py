"""From a run's settings (:class:`RunConfig`) to one flat mapping of dotted keys, and from that to verl's configuration.

The keys and defaults are those of verl's own files; a preset and the command line change some of them. A setting that
the run and verl both have has one value: giving different values under its two names is an error.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from groundwire.domains import TaskData
from groundwire.tools.machine import processors
from groundwire.tools.settings import suggestion_for
from groundwire.train.algorithms.model_size import MemoryPlan
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import NAMES
from groundwire.train.config.presets import BASE, VERL_PRESETS
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_names import (
    ENGINE_VENDOR,
    ESTIMATOR,
    LOGGER,
    MINIBATCH,
    OWN_ESTIMATOR,
    RUN_NAMES,
    SHARED,
    SHARED_PREFIXES,
    loss_keys,
)
from groundwire.train.policy.chat.tool_formats import FORMATS
from groundwire.train.policy.pretrained.locate import find_model, is_hub_name, local_folder, read_context_length
from groundwire.train.verl.memory_plan import TOKENS, plan_run
from groundwire.train.verl.ray_job import SETUP_HOOK, environment

INSTALL = "uv pip install -e '.[verl]' --override docs/verl-overrides.txt in a clone (docs/verl.md, also for pip)"
"""How to install verl. The project is not on the package index yet."""

_SAMPLERS = {"sync": "SyncSampler", "colocate_async": "AsyncSampler", "separate_async": "AsyncSampler"}
_WORKERS = "actor_rollout_ref.rollout.agent.num_workers"
_EXTENSION = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
_SCHEDULER = "+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls"
_WHOLE_REPLIES = "groundwire.train.policy.vllm.scheduler.WholeReplies"
_LORA_WORKERS = "groundwire.train.verl.lora_workers.LoraWorkers"
_ROUTER = "actor_rollout_ref.rollout.router_config_path"
_ROUTER_FILE = Path(__file__).parent / "shared_prefixes" / "router.yaml"
_SAMPLER_WORKERS = "trainer.v1.sampler.sampler_kwargs.workers"
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
_FIXED = {
    "algorithm.filter_groups.enable": "sampling_budget replaces groups with equal rewards, in all of verl's modes",
    "trainer.use_v1": "the rollouts run in verl's V1 trainer",
    _SAMPLER_WORKERS: f"give {_WORKERS}, which has the same value",
    **dict.fromkeys(
        (f"{_MULTI_TURN}.max_assistant_turns", f"{_MULTI_TURN}.max_user_turns"),
        "an agent has its own limit of turns, such as --agent-option max_turns=3",
    ),
}
"""Settings of verl that cannot be changed, and why."""
_MODE = "trainer.v1.trainer_mode"
_MOST_WORKERS_PER_GPU = 16  # each takes half a gigabyte
_UPDATES = "trainer.v1.separate_async.parameter_sync_step"
_EPOCHS = "trainer.total_epochs"
_OVERRIDES = "actor_rollout_ref.model.override_config."
_ATTENTION = f"+{_OVERRIDES}attn_implementation"
_MODEL_CONFIG = f"+{_OVERRIDES}model_config"
_RUNTIME_ENV = "+ray_kwargs.ray_init.runtime_env."


def compose_for_run(config: RunConfig, data: TaskData, run_dir: str) -> tuple[Any, MemoryPlan | None]:
    """verl's whole configuration for this run on this machine, and the plan for its GPUs, if it has some.

    Raises :class:`ConfigError`.
    """
    check_context_length(config)
    folder = local_folder(config.model)
    model = str(folder.resolve()) if folder else config.model  # verl's processes have another working directory
    flat = flat_config(
        config,
        run_dir=run_dir,
        model=model,
        n_gpus=max(1, count_gpus()),
        epoch_steps=len(data.train) // config.tasks_per_step,
    )
    plan = None
    if count_gpus():
        import torch

        plan = plan_run(config, flat, torch.cuda.get_device_properties(0).total_memory)
    if plan:
        flat[TOKENS] = plan.tokens
    return compose(flat), plan


def count_gpus() -> int:
    """GPUs that torch finds here."""
    with suppress(ImportError):
        import torch

        return int(torch.cuda.device_count())
    return 0


def flat_config(
    config: RunConfig,
    *,
    run_dir: str = "RUN_DIR",
    model: str | None = None,
    n_gpus: int = 1,
    epoch_steps: int | None = None,
) -> dict[str, Any]:
    """verl's dotted keys with this run's values; ``+`` marks keys that verl's files do not have, as in Hydra.

    ``model`` is the folder or hub name of the model, ``epoch_steps`` the steps of one pass over the training tasks.
    The keys come in four layers, and each wins over those before: what all runs with verl have (:data:`BASE`), what
    follows from the run's settings, verl's own settings that the preset and the user give, and what nobody can change.

    Raises :class:`ConfigError`.
    """
    given = _verl_overrides(config)
    plain = {key.lstrip("+"): value for key, value in given.items()}
    mode = plain.get(_MODE, BASE[_MODE])
    # separate_async divides a batch itself: one mini-batch for each update between two transfers of weights.
    updates = plain.get(_UPDATES, 4)
    workers = _workers(config, plain, n_gpus)
    _check_overrides(config, plain, mode, {_UPDATES: updates, _WORKERS: workers})
    minibatches = updates if mode == "separate_async" else config.minibatches
    attention = attention_settings(plain, model)
    attention["actor_rollout_ref.model.external_lib"] = SHARED_PREFIXES  # which has our attention, too
    changeable = {
        **BASE,
        MINIBATCH: max(1, config.tasks_per_step // minibatches),
        "trainer.n_gpus_per_node": n_gpus,
        **_from_settings(config, run_dir),
        **({} if model is None else {SHARED["model"]: model}),
        **({_EXTENSION: _LORA_WORKERS} if config.lora_rank else {}),
        **({_SCHEDULER: _WHOLE_REPLIES} if mode == "sync" else {}),  # other modes interrupt replies
        # Rollouts of an earlier policy: truncated importance sampling (Yao et al. 2025) corrects for it.
        **({} if mode == "sync" else {"algorithm.rollout_correction.rollout_is": "token"}),
        # Only verl's own router knows full_determinism.
        **({} if plain.get("actor_rollout_ref.rollout.full_determinism") else {_ROUTER: str(_ROUTER_FILE)}),
        **attention,
        **{_in_model_config(key): value for key, value in given.items()},
    }
    loggers = changeable[LOGGER]
    names = [loggers] if isinstance(loggers, str) else list(loggers)
    return {
        **changeable,
        **({} if other_estimator(config) else {ESTIMATOR: OWN_ESTIMATOR}),
        **_duration(config, changeable[_EPOCHS], epoch_steps),
        LOGGER: names if "file" in names else [*names, "file"],  # from which metrics.jsonl is made
        "trainer.v1.sampler.custom_sampler.name": _SAMPLERS[mode],
        _WORKERS: workers,
        f"+{_SAMPLER_WORKERS}": workers,
        **{f"{_RUNTIME_ENV}env_vars.{name}": value for name, value in environment(run_dir, config.track).items()},
        f"{_RUNTIME_ENV}worker_process_setup_hook": SETUP_HOOK,  # keys: env_vars would show them
        "+groundwire": {"run_dir": run_dir, "config": config.to_dict()},
    }


def _from_settings(config: RunConfig, run_dir: str) -> dict[str, Any]:
    return {
        **{key: getattr(config, name) for name, key in SHARED.items()},
        **{key: value for key, (value, _) in _derived(config).items()},
        "actor_rollout_ref.rollout.val_kwargs.do_sample": config.val_temperature > 0,
        "data.train_files": f"{run_dir}/tasks/train.parquet",
        "data.val_files": f"{run_dir}/tasks/validation.parquet",
        LOGGER: [*BASE[LOGGER], *config.track],
        "trainer.default_local_dir": f"{run_dir}/checkpoints",
        "trainer.experiment_name": Path(run_dir).name,
        TOKENS: max(BASE[TOKENS], config.max_model_len),
        _MODEL_CONFIG: {},
    }


def _duration(config: RunConfig, epochs: int, epoch_steps: int | None) -> dict[str, Any]:
    """verl stops at the first of two limits, so only the one that was given may count: steps or epochs."""
    if config.steps == 0:
        return {SHARED["steps"]: None if epoch_steps is None else max(1, epochs * epoch_steps)}
    return {} if _EPOCHS in config.verl else {_EPOCHS: BASE[_EPOCHS]}  # a preset's epochs are for its own steps


def _in_model_config(key: str) -> str:
    """The key under which verl takes this setting, if it changes the model's configuration.

    With a section ``model_config`` verl takes changes from there alone. Without one it would also write the name of the
    attention into ``config.json`` of every checkpoint, and nothing else than this project could load that.
    """
    name = key.lstrip("+").removeprefix(_OVERRIDES)
    if name == key.lstrip("+") or name.split(".")[0] in ("attn_implementation", "model_config"):
        return key
    return f"{_MODEL_CONFIG}.{name}"


def attention_settings(overrides: Mapping[str, Any], model: Path | str | None) -> dict[str, str | bool]:
    """verl's settings for the attention of ``model``, a folder or a name of the hub; empty where verl's own are right.

    Where flash-attn is not installed, torch's attention takes its place: without padding where the model, torch and
    ``overrides``, verl's given settings, allow it. Raises :class:`ConfigError` for a model that transformers does not
    know.
    """
    config = None if model is None else _read_config(model)
    if config is None:
        packs, padded, plain = True, "sdpa", True
    else:
        from groundwire.train.policy import attention

        if config.model_type in attention.MISCOMPUTED:
            raise ConfigError(
                f"{model} cannot be trained: transformers {version('transformers')} computes wrong log-probabilities "
                f"of models of type {config.model_type}: use another model, or transformers 5.24"
            )
        packs, padded = attention.packs(config), attention.padded_attention(config)
        plain = attention.has_plain_head(config)
    flash = importlib.util.find_spec("flash_attn") is not None
    if flash and packs:
        return {}
    # Without fused kernels and flash-attn verl takes logprobs token by token in Python, which is most of a step.
    settings: dict[str, str | bool] = {} if flash else {"actor_rollout_ref.model.use_fused_kernels": plain}
    key = "actor_rollout_ref.model.use_remove_padding"
    whole = overrides.get(key, True) and importlib.util.find_spec("torch.nn.attention.varlen") and not _is_old_gpu()
    chosen: dict[str, str | bool] = (
        {_ATTENTION: "groundwire_varlen"} if packs and whole else {key: False, _ATTENTION: padded}
    )
    if str(chosen[_ATTENTION]).startswith("groundwire"):
        settings["actor_rollout_ref.model.external_lib"] = "groundwire.train.policy.attention"
    return settings | chosen


def _read_config(model: Path | str) -> Any:
    """transformers' configuration of a model; a general one for a model with its own code, None if it is not here."""
    import transformers

    try:
        stored, _ = transformers.PretrainedConfig.get_config_dict(model)
    except OSError:
        return None
    try:
        return transformers.AutoConfig.for_model(**stored) if "model_type" in stored else None
    except Exception as error:  # transformers' own types for what it does not know, or finds contradictory
        if "auto_map" in stored:
            return transformers.PretrainedConfig()
        reason = "it does not know this type" if stored["model_type"] not in transformers.CONFIG_MAPPING else error
        raise ConfigError(
            f"{model} cannot be trained: its model_type is {stored['model_type']!r}, and transformers "
            f"{transformers.__version__} has no attention for it: {' '.join(str(reason).split())}"
        ) from error


def _is_old_gpu() -> bool:
    """Whether this machine's GPU is older than the kernels for sequences without padding (Ampere)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)


def other_estimator(config: RunConfig) -> str | None:
    """The advantage estimator of verl's that the settings name instead of the project's GRPO; None without one."""
    name = {key.lstrip("+"): value for key, value in _verl_overrides(config).items()}.get(ESTIMATOR)
    return None if name in (None, "grpo", OWN_ESTIMATOR) else str(name)


def chooses_old_logprobs(config: RunConfig, verl: Any) -> bool:
    """Whether :class:`.OldLogprobs` decides about the pass for old log-probabilities; ``verl`` is the composed config.

    Not where the pass is the user's choice, or has another purpose. Asynchronous modes sample with earlier weights and
    correct for that, router replay records its routes in the pass, a KL term in the reward is measured from its result,
    and the losses other than PPO's clip at distances from a ratio of 1 that may be as small as the sampler's error
    (GSPO's 0.0003).
    """
    given = any("rollout_correction" in key or "router_replay" in key for key in config.verl)
    needed = (
        verl.trainer.v1.trainer_mode != "sync"
        or verl.algorithm.use_kl_in_reward
        or verl.actor_rollout_ref.actor.policy_loss.loss_mode != "vanilla"
    )
    return not (given or needed)


def has_own_engine(verl: Any) -> bool:
    """Whether verl's workers have the engine of :mod:`.shared_prefixes.engine`; Megatron, for example, has its own."""
    actor_rollout = verl.actor_rollout_ref
    return (
        actor_rollout.model.external_lib == SHARED_PREFIXES
        and {actor_rollout.actor.strategy, actor_rollout.ref.strategy} <= {"fsdp", "fsdp2"}
        and os.environ.get("VERL_ENGINE_VENDOR") == ENGINE_VENDOR
    )


def why_unconstrained(verl: Any) -> str:
    """Why no reply can be constrained in a run with this composed config: it would be trained wrongly. "" if it can."""
    server, model = verl.actor_rollout_ref.rollout.name, verl.actor_rollout_ref.model
    if server != "vllm":
        return f"are only served with vLLM (rollout.name=vllm), and this run has rollout.name={server}"
    if not has_own_engine(verl):
        return (
            "are only trained by this project's engine for verl: leave VERL_ENGINE_VENDOR and model.external_lib as "
            "they are, and set actor.strategy and ref.strategy to fsdp or fsdp2"
        )
    backend = (model.fused_kernel_options or {}).get("impl_backend")
    if model.use_fused_kernels and backend == "triton":
        return "are not trained with model.fused_kernel_options.impl_backend=triton: leave it at torch"
    return ""


def _verl_overrides(config: RunConfig) -> dict[str, Any]:
    """verl's own settings, the preset's and then the user's, without those that are also settings of the run."""
    preset = {key: value for key, value in VERL_PRESETS[config.config].items() if "." in key}
    return {key: value for key, value in {**preset, **config.verl}.items() if key.lstrip("+") not in RUN_NAMES}


def _workers(config: RunConfig, overrides: Mapping[str, Any], n_gpus: int) -> Any:
    """The number of processes that run the rollouts. Each has a proxy, and remote runners know of one fixed port."""
    if config.external_store_address is not None and config.proxy_address[1]:
        return 1
    usual = max(1, min(_MOST_WORKERS_PER_GPU * n_gpus, processors() * 3 // 4))
    return overrides.get(_WORKERS, config.runner_processes or usual)


def _derived(config: RunConfig) -> dict[str, tuple[int, str]]:
    """Keys of verl that follow from the run's settings: the value, and what it is."""
    return {
        "data.max_prompt_length": (config.max_model_len - config.max_tokens, "max_model_len less max_tokens"),
        **{key: (value, f"part of {name} {getattr(config, name)}") for key, (value, name) in loss_keys(config).items()},
    }


def _check_overrides(config: RunConfig, overrides: Mapping[str, Any], mode: str, counts: Mapping[str, Any]) -> None:
    for key in overrides:
        if key in _FIXED:
            raise ConfigError(f"{key} cannot be changed: {_FIXED[key]}")
        if inner := next((name for name in (*RUN_NAMES, *_FIXED) if name.startswith(f"{key}.")), None):
            raise ConfigError(f"{key} is a whole section, with {inner} in it: give its settings one by one")
    if overrides.get("algorithm.use_kl_in_reward") and other_estimator(config) is None:
        raise ConfigError(
            "algorithm.use_kl_in_reward cannot be set: advantages are computed from the rollouts' rewards, before verl "
            "subtracts the KL term; use kl_coef"
        )
    if mode not in _SAMPLERS:
        raise ConfigError(f"{_MODE} is {mode!r}; it is one of {', '.join(_SAMPLERS)}")
    if wrong := [key for key, number in counts.items() if not isinstance(number, int) or number < 1]:
        raise ConfigError(f"{wrong[0]} is {counts[wrong[0]]!r}; it must be a whole number of at least 1")
    if mode == "separate_async" and config.tasks_per_step % (updates := counts[_UPDATES]):
        raise ConfigError(
            f"tasks_per_step is {config.tasks_per_step} and {_UPDATES} is {updates}: separate_async divides a batch "
            "into that many equal parts"
        )
    if config.max_model_len <= config.max_tokens:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} and max_tokens {config.max_tokens}: this leaves no prompt tokens"
        )
    for key, (value, meaning) in _derived(config).items():
        if overrides.get(key, value) != value:
            raise ConfigError(f"{key}={overrides[key]}: it is {meaning}, here {value}; change those")
    tokens = overrides.get(TOKENS, config.max_model_len)
    if not isinstance(tokens, int) or tokens < config.max_model_len:
        raise ConfigError(
            f"{TOKENS} is {tokens!r}, less than one trajectory of max_model_len {config.max_model_len} tokens"
        )
    parser = overrides.get("actor_rollout_ref.rollout.multi_turn.format")
    if parser is not None and parser not in FORMATS:
        raise ConfigError(f"multi_turn.format is {parser!r}; tool calls are read as {', '.join(FORMATS)}")


def check_context_length(config: RunConfig) -> None:
    """Raise :class:`ConfigError` if ``max_model_len`` is more than a model on this machine has."""
    if is_hub_name(config.model):
        return
    length = read_context_length(find_model(config.model)) or config.max_model_len
    if length < config.max_model_len:  # vLLM would refuse it after minutes
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but {config.model} has {length} positions: give at most {length}"
        )


def compose(flat: Mapping[str, Any]) -> Any:
    """verl's whole configuration with ``flat`` in it, as an OmegaConf ``DictConfig``.

    Keys without a dot choose one of Hydra's groups (``model_engine=megatron``). Raises :class:`ConfigError` for a key
    that verl does not have.
    """
    spec = importlib.util.find_spec("verl")  # found without importing it
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"verl is not installed: {INSTALL}")
    folder = Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
    try:
        from hydra import compose as hydra_compose
        from hydra import initialize_config_dir
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: {INSTALL}") from error

    groups = [f"{key}={value}" for key, value in flat.items() if "." not in key and key[0] != "+"]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = hydra_compose("ppo_trainer", overrides=groups)
    except HydraException as error:
        why = str(error).splitlines()[0].rstrip(".")
        hint = next((suggestion_for(name, NAMES) for name in flat if f"'{name}'" in why), "")
        raise ConfigError(f"verl cannot be configured with {' '.join(groups)}: {why}{hint}") from error
    known = set(_dotted_keys(OmegaConf.to_container(config, resolve=False)))
    for key, value in flat.items():
        if f"{key}={value}" in groups:
            continue
        name = key.lstrip("+")
        if name == key and name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"write +{name}=… to add it"
            raise ConfigError(f"verl has no setting {name}: {hint}")
        OmegaConf.update(config, name, value, merge=False, force_add=True)
    return config


def _dotted_keys(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key, sections included."""
    for key, value in section.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _dotted_keys(value, f"{prefix}{key}.")
