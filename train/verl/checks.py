"""Checks before a run with verl: tasks, devices, model, packages, and verl's own validation of its configuration."""

from __future__ import annotations

import importlib.util
import os
import sys

from groundwire.domains import TaskData
from groundwire.tools.terminal import installed_version
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy.pretrained.locate import check_hub, is_hub_name
from groundwire.train.verl.hydra_config import compose_for_run, count_devices, other_estimator, uses_npu

__all__ = ["check", "peft_problem"]

_PEFT_LIMIT = (0, 21)


def check(config: RunConfig, data: TaskData) -> None:
    """Raise :class:`ConfigError` if this run cannot be trained on this machine. Nothing is written.

    Warns on stderr about settings without an effect.
    """
    if estimator := other_estimator(config):
        print(
            f"warning: with algorithm.adv_estimator={estimator} verl computes the advantages from the rewards of rows: "
            "credit, credit_discount and call_cost have no effect",
            file=sys.stderr,
        )
    if len(data.train) < config.tasks_per_step:
        raise ConfigError(f"{len(data.train)} training tasks, but tasks_per_step is {config.tasks_per_step}")
    composed, plan = compose_for_run(config, data, "RUN_DIR")
    if plan:
        print(f"memory: predicted {plan}", file=sys.stderr)
    model, rollout = composed.actor_rollout_ref.model, composed.actor_rollout_ref.rollout
    if composed.trainer.nnodes == 1 and "RAY_ADDRESS" not in os.environ:  # a Ray cluster may have more devices
        _check_devices(composed.trainer.n_gpus_per_node, npu=uses_npu(config))
    if is_hub_name(config.model):
        check_hub(config.model)
    if composed.trainer.v1.trainer_mode == "separate_async" and not rollout.nnodes:
        raise ConfigError("separate_async needs GPUs for sampling alone: docs/verl.md lists the settings")
    if model.lora_rank > 0 and (problem := peft_problem()):
        raise ConfigError(": ".join(problem))
    if rollout.checkpoint_engine.backend == "nccl" and importlib.util.find_spec("cupy") is None:
        raise ConfigError("checkpoint_engine.backend is nccl, which verl uses through cupy: pip install cupy-cuda13x")
    try:
        import ray  # noqa: F401 (train() starts it)
        from verl.trainer.main_ppo import run_ppo  # noqa: F401 (as above)
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.utils.config import validate_config
        from verl.utils.device import auto_set_device
    except ImportError as error:
        raise ConfigError(f"verl cannot be imported: {error}. groundwire doctor lists what is missing") from error
    auto_set_device(composed)
    try:
        validate_config(
            config=composed, use_reference_policy=need_reference_policy(composed), use_critic=need_critic(composed)
        )
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"verl refuses this configuration: {error}") from error


def peft_problem() -> tuple[str, str] | None:
    """Why the installed peft cannot train LoRA adapters, and what to do; None if it can."""
    fix = "pip install 'peft<0.21'"
    installed = installed_version("peft")
    if installed is None:
        return "peft is not installed", fix
    if tuple(int(part) for part in installed.split(".")[:2]) < _PEFT_LIMIT:
        return None
    # Its get_peft_model_state_dict() selects modules by name, and FSDP's wrapping changes the names.
    return f"peft {installed} hides adapters from verl 0.9.1, so vLLM would sample without them", fix


def _check_devices(wanted: int, *, npu: bool) -> None:
    found, kind = count_devices(npu=npu), "NPUs" if npu else "GPUs"
    if not found:
        raise ConfigError(
            f"verl trains on {kind}, and torch finds none here: leave out --trainer verl, or run "
            "groundwire doctor --trainer verl for the reason"
        )
    if wanted > found:
        raise ConfigError(f"trainer.n_gpus_per_node is {wanted}, but torch finds {found} {kind} here")
