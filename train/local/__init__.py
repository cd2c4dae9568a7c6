"""The embedded trainer: GRPO on one machine."""
