"""The policy on this machine: model, tokenizer, sampling engine, and policy server."""

from pathlib import Path

STARTER = Path(__file__).resolve().with_name("starter")
"""The checkpoint that ships with the project."""
