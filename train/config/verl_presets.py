"""The presets of ``--trainer verl``: plain dictionaries, to be copied and edited.

A key with a dot is verl's own (with ``+`` if verl's files do not name it, as on Hydra's command line); a key without a
dot is a setting of :class:`groundwire.train.config.run_config.RunConfig`. A setting that both have is given once, under
the run's name: see :data:`groundwire.train.config.verl_names.SHARED`.
"""

from __future__ import annotations

import re
from typing import Any

_MANAGER = "groundwire.train.verl.agent_loop_manager.RolloutManager"

BASE: dict[str, Any] = {
    # The loss of GRPO without KL, averaged over tokens, with a higher clipping range above than below.
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    # Rollouts differ in length: batches are filled by tokens, not by rows.
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 32768,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.mode": "async",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.multi_turn.format": "hermes",
    # Our rollouts in verl's V1 trainer.
    "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": _MANAGER,
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    "trainer.v1.sampler.custom_sampler.path": "pkg://groundwire.train.verl.samplers",
    # verl replaces a group without results by another prompt, one prompt at a time.
    "trainer.v1.sampler.sync_refill_failed_groups": True,
    "data.gen_batch_size": 1,
    # A prompt is one line of JSON and rewards come with the rollouts, so neither needs processes.
    "data.dataloader_num_workers": 0,
    "data.shuffle": True,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
    "trainer.logger": ["console", "file"],
    "trainer.project_name": "groundwire",
    "trainer.nnodes": 1,
    "trainer.total_epochs": 1000,  # enough for any number of steps
    "trainer.resume_mode": "auto",
    "trainer.max_actor_ckpt_to_keep": 2,
    "actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    "+ray_kwargs.ray_init.include_dashboard": False,
}
"""verl's own settings that all presets share."""

_REFERENCE: dict[str, Any] = {
    "agent_match": "write",
    "agent_options": {
        "max_turns": 3,
        "check_last": True,
        "prompt_profile": "full",
        "example_values": 3,
        "show_keys": True,
        "table_info_truncate": 2048,
        "execution_truncate": 2048,
    },
    "tasks_per_step": 32,
    "group_size": 4,
    "max_tokens": 2048,
    "max_model_len": 4096 + 2048,
    "n_runners": 10,
    "rollout_timeout_s": 300.0,
    "steps": 0,
    "checkpoint_every": 64,
    "val_tasks": 500,
    "val_every": 32,
    "minibatches": 1,
    "learning_rate": 1e-6,
    "warmup_steps": 0,
    "track": ["wandb"],  # if one is logged in
    "trainer.total_epochs": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8,
    "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
}
"""The published recipe for Spider: 32 prompts x 4, prompts of 4096 and replies of 2048 tokens, two epochs.

``groundwire run --print-config --diff`` lists what still differs, with the reasons.
"""

_TOOL_CALLS: dict[str, Any] = {
    **{name: value for name, value in _REFERENCE.items() if name != "agent_match"},
    "+data.apply_chat_template_kwargs.enable_thinking": False,
}
"""The recipe for agents whose one agent is trained, with a model of the Qwen3 family."""

VERL_PRESETS: dict[str, dict[str, Any]] = {
    # A check of the installation: one step of a small model and the whole validation, as published.
    "fast": {
        **_REFERENCE,
        "model": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "steps": 1,
        "val_tasks": 0,
        "val_every": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
    },
    # The published reference.
    "qwen": {**_REFERENCE, "model": "Qwen/Qwen2.5-Coder-1.5B-Instruct"},
    "qwen3b": {**_REFERENCE, "model": "Qwen/Qwen2.5-Coder-3B-Instruct"},
    # A small model trained for tool calls: for the OpenAI Agents and MCP backends, whose one agent is trained.
    "qwen3": {**_TOOL_CALLS, "model": "Qwen/Qwen3-0.6B"},
    # The medical agent: two epochs, with validation and checkpoint every 20 steps.
    "medical": {
        **_TOOL_CALLS,
        "model": "Qwen/Qwen3-1.7B",
        "backend": "openai-agents",
        "domain": "medical",
        "val_every": 20,
        "checkpoint_every": 20,
    },
    "llama": {
        **_REFERENCE,
        "model": "meta-llama/Llama-3.2-1B-Instruct",
        "actor_rollout_ref.rollout.multi_turn.format": "llama3_json",
    },
    "llama3b": {
        **_REFERENCE,
        "model": "meta-llama/Llama-3.2-3B-Instruct",
        "actor_rollout_ref.rollout.multi_turn.format": "llama3_json",
    },
    # The reference with LoRA adapters: a fraction of the optimizer's memory, a larger learning rate.
    "lora": {
        **_REFERENCE,
        "model": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "learning_rate": 1e-5,
        "lora_rank": 32,
        "actor_rollout_ref.model.lora_alpha": 32,
        "actor_rollout_ref.model.target_modules": "all-linear",
        "actor_rollout_ref.rollout.load_format": "safetensors",
    },
    # The starter policy; it needs no model hub.
    "starter": {
        "model": "starter",
        "agent_options": {"max_turns": 2, "table_info_truncate": 4000, "execution_truncate": 72},
        "tasks_per_step": 32,
        "n_runners": 256,
        "learning_rate": 5e-5,
        "warmup_steps": 0,
        "minibatches": 1,
        "steps": 40,
        "val_every": 10,
        "checkpoint_every": 20,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.rollout.max_num_seqs": 512,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4,
    },
}

_VARIANT = re.compile(r"qwen3b-turns(\d)-chars(\d+)(-check)?")


def removed_preset(name: str) -> str:
    """What to do without a preset of this name, which earlier versions had; "" for other names."""
    if name == "npu":
        return "the preset npu is gone, as it never ran on an Ascend device; docs/published.md has its settings"
    if not (variant := _VARIANT.fullmatch(name)):
        return ""
    turns, characters, check = variant.groups()
    options = {"max_turns": turns, "table_info_truncate": characters, "execution_truncate": characters}
    pairs = " ".join(f"--agent-option {option}={value}" for option, value in options.items())
    return f"the preset {name} is now qwen3b {pairs}{' --agent-match ' + repr('write|check') if check else ''}"
