"""Names of earlier versions that are no setting any more: what they are fixed to now, and what to do in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groundwire.train.config.errors import ConfigError

SQL_AGENT_OPTIONS = {
    "max_turns": "max_turns",
    "check_last": "check_last",
    "prompt_profile": "prompt_profile",
    "table_info_truncate": "table_info_truncate",
    "example_values": "example_values",
    "sample_values": "example_values",
    "show_keys": "show_keys",
    "keys": "show_keys",
    "execution_truncate": "execution_truncate",
}
"""Names that were settings of the run, and the options of the SQL agents that they are now."""

_ACTOR = "actor_rollout_ref.actor"
OF_RUN: dict[str, tuple[Any, str]] = {
    "branches_per_row": (None, "replies share a prompt as the device allows; leave it out"),
    "clip_low": (0.2, f"it is 0.2 (with verl: {_ACTOR}.clip_ratio_low)"),
    "fixed_sampling": (True, "the run's sampling always replaces what agents ask for; leave it out"),
    "gradient_checkpointing": (
        "auto",
        "on CUDA activations are computed again (with verl: actor_rollout_ref.model.enable_gradient_checkpointing)",
    ),
    "keep_best": (True, "the policy with the best validation is always kept; leave it out"),
    "logits_per_chunk": (1 << 26, "logits are computed in chunks of 2^26; leave it out"),
    "lora_alpha": (16, "it is 16 (with verl: actor_rollout_ref.model.lora_alpha)"),
    "max_batch": (
        128,
        "as many requests are decoded together as rollouts run at once, n_runners (with verl: "
        "actor_rollout_ref.rollout.max_num_seqs)",
    ),
    "max_grad_norm": (1.0, f"it is 1 (with verl: {_ACTOR}.optim.clip_grad)"),
    "pareto_tasks": (40, "the Pareto front has 40 tasks; leave it out"),
    "proxy_port": (0, "give it with the host, --proxy-host HOST:PORT"),
    "reflection_base_url": (None, "give it with the model, --reflection-model NAME@URL"),
    "reflection_tasks": (4, "a reflection reads 4 tasks; leave it out"),
    "scale_rewards": (True, "--loss dr-grpo does not divide by the standard deviation, every other loss does"),
    "step_deadline_s": (None, "a step may take six times --rollout-timeout-s; give that"),
    "store_wait_s": (120.0, "a run waits 120 s for its store; leave it out"),
    "tokens_per_forward": (
        None,
        f"as many as fit into the GPU's memory, and 2048 on a CPU (with verl: {_ACTOR}.ppo_max_token_len_per_gpu)",
    ),
    "unresponsive_s": (30.0, "a runner without a heartbeat is given up after 30 s; leave it out"),
    "val_every_tasks": (64, "the shorter validations have 64 questions; leave it out"),
    "weight_decay": (0.0, f"the local trainer has none (with verl: {_ACTOR}.optim.weight_decay)"),
}
"""Of a run: the only value that it can have, None where any value of a stored run is dropped, and the sentence."""
OF_SFT = {
    "attention": "one row without padding on a GPU, padded rows on a CPU; leave it out",
    "checkpoint_every": "a checkpoint is written every 200 steps, and when the run is stopped; leave it out",
    "max_tokens": "first queries have at most 96 tokens; leave it out",
    "questions_per_schema": "6 questions share a schema, and 24 without --augment; leave it out",
    "tokens_per_forward": "2048 on a CPU, 16384 on a GPU; leave it out",
    "val_every": "the held-out loss is measured every 100 steps; leave it out",
    "warmup_steps": "the learning rate rises in 40 steps; leave it out",
    "weight_decay": "it is 0.01; leave it out",
}
"""Of supervised fine-tuning."""


def sentences(*tables: Mapping[str, tuple[Any, str] | str]) -> dict[str, str]:
    """What to do in place of each name, those of the SQL agents' options included."""
    options = {
        old: f"it is an option of the SQL agents: --agent-option {name}=VALUE"
        for old, name in SQL_AGENT_OPTIONS.items()
    }
    gone = {name: entry for table in tables for name, entry in table.items()}
    return options | {name: entry if isinstance(entry, str) else entry[1] for name, entry in gone.items()}


def present(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stored run by their names of today."""
    settings = {name: value for name, value in stored.items() if name not in (*OF_RUN, *SQL_AGENT_OPTIONS, "llm_proxy")}
    options = {SQL_AGENT_OPTIONS[name]: value for name, value in stored.items() if name in SQL_AGENT_OPTIONS}
    return {**settings, "agent_options": {**options, **settings.get("agent_options", {})}} if options else settings


def check_stored(stored: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for a value that a stored run had and that no run can have any more."""
    for name, (fixed, sentence) in OF_RUN.items():
        if fixed is not None and stored.get(name, fixed) != fixed:
            raise ConfigError(
                f"the run was started with {name}={stored[name]}, which is no setting any more: {sentence}; start a "
                "new run"
            )
