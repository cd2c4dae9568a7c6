"""The policy on this machine: model, tokenizer, sampling engine, and the server in front of it."""

from pathlib import Path

__all__ = ["STARTER"]

STARTER = Path(__file__).resolve().with_name("starter")
"""The checkpoint that ships with the project."""
