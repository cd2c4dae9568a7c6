"""The policy with the best validation is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bandits
import pytest
import torch

from groundwire.train.artifacts.checkpoints import Checkpoints
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluation.run_reader import summarize
from groundwire.train.policy.model import load_policy

SCORES = [[1, 1], [0, 0.4], [0.6, 0.6], [0.5, 0.3]]
"""The scores of the validation's questions at each step; those at step 0 are of the model at the start."""


def _run(folder: Path, tiny_policy: Any, scores: Sequence[Sequence[float]] = SCORES, **settings: Any) -> RunDir:
    """A run with these scores of its validations; by default its policy gets worse after the second step."""

    class Trainer(bandits.LocalTrainer):
        def _validate(self, step: int) -> dict[str, Any]:
            self._scores = {"validation_sampled": {str(task): score for task, score in enumerate(scores[step])}}
            n = len(scores[step])
            return {"validation_sampled": {"accuracy": sum(scores[step]) / n, "ci95": [0, 1], "n": n, "total": n}}

    async def agent(choose: bandits.Choose) -> str:
        return await choose("which?", "01")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandits, "LocalTrainer", Trainer)
        given = {"steps": 3, "val_every": 1, "val_temperature": 1.0, "group_size": 16, "warmup_steps": 0, **settings}
        return bandits.train(folder, tiny_policy, agent, float, checkpoint_every=1, **given)


def test_the_best_policy_of_the_trained_ones_is_kept_and_named(tiny_policy: Any, tmp_path: Path) -> None:
    run = _run(tmp_path, tiny_policy)
    folder = run.path / "checkpoints" / "best"
    figures = {"step": 2, "accuracy": 0.6, "n": 2, "total": 2, "scores": {"0": 0.6, "1": 0.6}}
    assert json.loads((folder / "validation.json").read_text()) == figures
    best, of_step_2 = (load_policy(path)[0] for path in (folder, run.path / "checkpoints" / "step-00002"))
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), of_step_2.parameters(), strict=True))
    assert not (folder / "trainer.pt").exists()
    assert [path.name for path in run.checkpoints.paths()] == ["step-00002", "step-00003"]
    summary = summarize(run, resolve("fast"), "a bandit")
    assert summary["best_checkpoint"] == {"step": 2, "accuracy": 0.6, "n": 2}


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        ([1, 0.8, 0, 0], 3),  # better on the two questions that all validations have, though 0.45 is less than 0.8
        ([0.7, 0.8, 1, 1], 2),  # worse on them, though 0.875 is more
        ([0.8, 0.8, 0, 0], 3),  # equal on them, and trained longer
    ],
)
def test_validations_of_more_questions_are_compared_on_those_that_both_judged(
    last: list[float], kept: int, tiny_policy: Any, tmp_path: Path
) -> None:
    run = _run(tmp_path, tiny_policy, [[0, 0, 0, 0], [0.5, 0.5], [0.8, 0.8], last])
    assert (run.checkpoints.best() or {})["step"] == kept


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"step": 1}', '{"step": null, "accuracy": 1, "n": 1, "total": 1}', "\x00"]
)
def test_a_damaged_file_counts_as_no_best_checkpoint(content: str, tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "validation.json").write_text(content)
    assert Checkpoints(tmp_path).best() is None
