"""The published recipe of the SQL agent, to compare a run's settings with: ``groundwire run --print-config --diff``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groundwire.train.config.run_config import RunConfig

_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"

RECIPE: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "tasks_per_step": 32,
    "group_size": 4,
    "agent_options.max_turns": 3,
    "agent_options.check_last": True,
    "agent_options.table_info_truncate": 2048,
    "agent_options.execution_truncate": 2048,
    "agent_match": "write",
    "n_runners": 10,
    "max_tokens": 2048,
    "max_model_len": 4096 + 2048,
    "learning_rate": 1e-6,
    f"{_ACTOR}.clip_ratio_low": 0.2,
    "clip_high": 0.3,
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "minibatches": 1,
    "val_every": 32,
    "checkpoint_every": 64,
    "track": ["wandb"],
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{_ACTOR}.fsdp_config.param_offload": True,
    f"{_ACTOR}.fsdp_config.optimizer_offload": True,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    f"{_MODEL}.use_remove_padding": True,
    f"{_MODEL}.enable_gradient_checkpointing": True,
    f"{_ROLLOUT}.name": "vllm",
    f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    f"{_ROLLOUT}.gpu_memory_utilization": 0.8,
    f"{_ROLLOUT}.multi_turn.format": "hermes",
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.project_name": "AgentLightning",
    "trainer.total_epochs": 2,
}
"""The settings of the run and those of verl's own that the recipe gives."""

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
