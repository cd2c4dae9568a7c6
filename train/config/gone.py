"""Names of earlier versions that are no setting any more, and what to do in their place."""

from __future__ import annotations

_RENAMED = {"sample_values": "example_values", "keys": "show_keys"}
_OPTIONS = (
    *("max_turns", "check_last", "prompt_profile", "table_info_truncate", "example_values", "show_keys"),
    *("execution_truncate", *_RENAMED),
)
OF_SQL_AGENTS = {
    name: f"it is an option of the SQL agents: --agent-option {_RENAMED.get(name, name)}=VALUE" for name in _OPTIONS
}
"""Options of the SQL agents that were settings."""

_ACTOR = "actor_rollout_ref.actor"
OF_RUN = {
    "branches_per_row": "replies share a prompt as the device allows; leave it out",
    "clip_low": f"it is 0.2 (with verl: {_ACTOR}.clip_ratio_low)",
    "fixed_sampling": "the run's sampling always replaces what agents ask for; leave it out",
    "gradient_checkpointing": (
        "on CUDA activations are computed again (with verl: actor_rollout_ref.model.enable_gradient_checkpointing)"
    ),
    "keep_best": "the policy with the best validation is always kept; leave it out",
    "logits_per_chunk": "logits are computed in chunks of 2^26; leave it out",
    "lora_alpha": "it is 16 (with verl: actor_rollout_ref.model.lora_alpha)",
    "max_batch": (
        "as many requests are decoded together as rollouts run at once, n_runners (with verl: "
        "actor_rollout_ref.rollout.max_num_seqs)"
    ),
    "max_grad_norm": f"it is 1 (with verl: {_ACTOR}.optim.clip_grad)",
    "pareto_tasks": "the Pareto front has 40 tasks; leave it out",
    "proxy_port": "give it with the host, --proxy-host HOST:PORT",
    "reflection_base_url": "give it with the model, --reflection-model NAME@URL",
    "reflection_tasks": "a reflection reads 4 tasks; leave it out",
    "scale_rewards": "--loss dr-grpo does not divide by the standard deviation, every other loss does",
    "step_deadline_s": "a step may take six times --rollout-timeout-s; give that",
    "store_wait_s": "a run waits 120 s for its store; leave it out",
    "tokens_per_forward": (
        f"as many as fit into the GPU's memory, and 2048 on a CPU (with verl: {_ACTOR}.ppo_max_token_len_per_gpu)"
    ),
    "unresponsive_s": "a runner without a heartbeat is given up after 30 s; leave it out",
    "val_every_tasks": "the shorter validations have 64 questions; leave it out",
    "weight_decay": f"the local trainer has none (with verl: {_ACTOR}.optim.weight_decay)",
}
"""Of a run."""
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
