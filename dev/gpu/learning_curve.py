"""Draws a learning experiment of ``docs/gpu-suite.json``, as every run draws its own curve.

    python -m dev.gpu.learning_curve docs/images/curve.png

The training reward of a seed, and the accuracy of the whole agent before and after, greedy and sampled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from groundwire.train.evaluation.validation import VALIDATIONS
from groundwire.train.report.charts import draw_curve

_SUITE = Path(__file__).parents[2] / "docs" / "gpu-suite.json"
_PART, _AGENT, _SEED = "learning with SFT on two thirds, and 200 steps with verl, 2026-11-24", "langgraph", "seed 0"


def metrics(part: dict[str, Any], agent: str, seed: str) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` that the results of a ``part`` still have."""

    def validated(model: str) -> dict[str, Any]:
        return {key: part["accuracy"][f"{agent}, {way}, {model}"] for key, way in VALIDATIONS.items()}

    rewards = part["training"][f"{agent}, {seed}"]["reward"]
    steps = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, 1)]
    return [{"step": 0, **validated("sft")}, *steps[:-1], {**steps[-1], **validated(seed)}]


if __name__ == "__main__":
    draw_curve(metrics(json.loads(_SUITE.read_text())[_PART], _AGENT, _SEED), Path(sys.argv[1]))
