"""Whole runs of models outside of the families that our own decoder computes: rollouts, updates, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bandits
import pytest
import torch
from small_models import small_causal_lm

from groundwire.train.policy.model import load_policy


@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2", "qwen3_5_text"])
def test_the_reward_of_a_run_rises(
    tiny_policy: Any, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_policy[1]
    model = small_causal_lm(kind, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)

    async def agent(choose: bandits.Choose) -> str:
        return await choose("which?", "0123456789")

    settings = {"steps": 6, "group_size": 16, "warmup_steps": 0, "seed": 1, "learning_rate": 3e-3}
    run = bandits.train(tmp_path, (model, tokenizer), agent, lambda digit: int(digit) / 9, **settings)
    assert f"{type(model).__name__} is sampled by transformers' forward pass" in capsys.readouterr().err
    _, *steps = run.metrics()
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
    assert all(step.get("initial_ratio_error", 0.0) < 1e-4 for step in steps)
    saved, _ = load_policy(run.checkpoints.paths()[-1])
    assert type(saved) is type(model)
    assert any(not torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
