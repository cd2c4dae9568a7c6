"""The embedded trainer: a tiny policy, its server, and GRPO, on a CPU."""

from pathlib import Path

__all__ = ["STARTER"]

STARTER = Path(__file__).with_name("starter")
"""The checkpoint that ships with the project."""
