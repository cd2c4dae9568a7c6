"""The policy with the best validation is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bandits
import pytest
import torch

from groundwire.train.artifacts.checkpoints import Checkpoints
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.summary import summarize
from groundwire.train.config.resolve import resolve
from groundwire.train.policy.model import load_policy

SCORES = {0: 0.9, 1: 0.2, 2: 0.6, 3: 0.4}
"""The accuracy of the validation at each step; that at step 0 is of the model at the start."""


def _run(folder: Path, tiny_policy: Any, **settings: Any) -> RunDir:
    """A run whose policy gets worse after its second step."""
    steps = iter(SCORES.values())

    class Trainer(bandits.LocalTrainer):
        def _validate(self, step: int) -> dict[str, Any]:
            validation = {"accuracy": next(steps), "ci95": [0.0, 1.0], "n": 5, "total": 5}
            return {"validation_sampled": validation}

    async def agent(choose: bandits.Choose) -> str:
        return await choose("which?", "01")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandits, "LocalTrainer", Trainer)
        given = {"steps": 3, "val_every": 1, "val_temperature": 1.0, "group_size": 16, "warmup_steps": 0, **settings}
        return bandits.train(folder, tiny_policy, agent, float, checkpoint_every=1, **given)


def test_the_best_policy_of_the_trained_ones_is_kept_and_named(tiny_policy: Any, tmp_path: Path) -> None:
    run = _run(tmp_path, tiny_policy)
    folder = run.path / "checkpoints" / "best"
    assert json.loads((folder / "validation.json").read_text()) == {"step": 2, "accuracy": 0.6, "n": 5, "total": 5}
    best, of_step_2 = (load_policy(path)[0] for path in (folder, run.path / "checkpoints" / "step-00002"))
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), of_step_2.parameters(), strict=True))
    assert not (folder / "trainer.pt").exists()
    assert [path.name for path in run.checkpoints.paths()] == ["step-00002", "step-00003"]
    summary = summarize(run, resolve("fast"), "a bandit")
    assert summary["best_checkpoint"] == {"step": 2, "accuracy": 0.6, "n": 5}


def test_without_keep_best_there_is_none(tiny_policy: Any, tmp_path: Path) -> None:
    run = _run(tmp_path, tiny_policy, keep_best=False)
    assert run.checkpoints.best() is None
    assert not (run.path / "checkpoints" / "best").exists()
    assert "best_checkpoint" not in summarize(run, resolve("fast"), "a bandit")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": null, "accuracy": 1, "n": 1, "total": 1}', "\x00"])
def test_a_damaged_file_counts_as_no_best_checkpoint(content: str, tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "validation.json").write_text(content)
    assert Checkpoints(tmp_path).best() is None
