"""The presets of the local trainer: plain dictionaries, to be copied and edited."""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]

_HF: dict[str, Any] = {
    "learning_rate": None,  # by the model's size
    "minibatches": 1,
    "steps": 200,
    "agent_options": {
        "max_turns": 3,
        "prompt_profile": "full",
        "example_values": 3,
        "show_keys": True,
        "execution_truncate": 2048,
    },
    "max_tokens": 512,
    "max_model_len": 4096,
    "checkpoint_every": 10,
    "rollout_timeout_s": 300.0,
}

PRESETS: dict[str, dict[str, Any]] = {
    # The starter policy on a laptop: minutes on two cores. docs/algorithms.md compares these values with others.
    "fast": {
        "tasks_per_step": 20,
        "steps": 44,
        "learning_rate": 4e-4,
        "lr_schedule": "linear",
        "credit": "turns",
        "agent_options": {"max_turns": 2, "table_info_truncate": 4000, "execution_truncate": 72},
    },
    # Any Hugging Face causal language model, on one GPU, or slowly on a CPU.
    "hf": _HF,
    # The medical agent: two epochs of the bundled questions, 12 a step, with validation and checkpoint every 20 steps.
    "medical": {
        **_HF,
        "backend": "openai-agents",
        "domain": "medical",
        "steps": 138,
        "val_every": 20,
        "checkpoint_every": 20,
    },
}
"""The defaults of :class:`RunConfig` that each preset changes."""
