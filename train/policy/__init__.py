"""The policy on this machine: model, tokenizer, sampling engine, and policy server."""

from pathlib import Path

__all__ = ["STARTER", "STARTER_NOTES"]

STARTER = Path(__file__).resolve().with_name("starter")
"""The checkpoint that ships with the project."""

STARTER_NOTES = {
    "sql": "The starter is a toy policy that stopped learning early on purpose, so that reinforcement learning has "
    "room. It was made for English questions, SQL, and prompts of up to 2,000 tokens. The bundled validation databases "
    "are new to it but generated; on real Spider it scores near zero.",
    "prose": "The starter is a toy policy that knows nothing but SQL over other databases: it writes no prose, and its "
    "reward says nothing of a real model's. This run shows that everything works; give --model a model that can write.",
}
"""What a reader of the starter's results needs to know, by the form of the domain's answers."""
