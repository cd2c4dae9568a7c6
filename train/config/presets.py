"""The presets of the local trainer: plain dictionaries, to be copied and edited."""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]

PRESETS: dict[str, dict[str, Any]] = {
    # The starter policy on a laptop: minutes on two cores.
    "fast": {},
    # Any Hugging Face causal language model, on one GPU, or slowly on a CPU.
    "hf": {
        "learning_rate": None,  # by the model's size
        "minibatches": 1,
        "steps": 200,
        "max_turns": 3,
        "prompt_profile": "full",
        "example_values": 3,
        "show_keys": True,
        "execution_truncate": 2048,
        "max_tokens": 512,
        "max_model_len": 4096,
        "checkpoint_every": 10,
        "rollout_timeout_s": 300.0,
        "step_deadline_s": 1800.0,
    },
}
"""The defaults of :class:`RunConfig` that each preset changes."""
