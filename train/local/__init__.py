"""The embedded trainer: a tiny policy, its server, and GRPO, on a CPU."""
