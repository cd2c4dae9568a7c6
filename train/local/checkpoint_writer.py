"""Writes the policy and the trainer's state into the checkpoints of a run."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.local.update.grpo import GRPO
from groundwire.train.local.update.lora import merged_weights
from groundwire.train.policy.pretrained.model_files import save_policy

__all__ = ["CheckpointWriter"]

_ROUNDING = 1e-9
_DISK_FULL_BYTES = 8 << 20
"""A failed write with less free space than this is reported as a full disk."""


class CheckpointWriter:
    """Adapters are merged into the weights that it writes."""

    def __init__(self, run: RunDir, grpo: GRPO, tokenizer: Any) -> None:
        self._run, self._grpo, self._tokenizer = run, grpo, tokenizer

    def write(self, step: int) -> None:
        """Write the checkpoint of a step, from which the run can be resumed."""
        with self._run.checkpoints.write(step) as folder, self._named_disk_errors(folder):
            self._save_policy(folder)
            torch.save(self._grpo.state(), folder / "trainer.pt")

    def keep_best(self, step: int, validation: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Save the policy if its validation is the best so far; ``scores`` are those of its questions.

        Validations may have different numbers of questions, which are not equally hard: those that both judged decide.
        """
        best = self._run.checkpoints.best()
        if scores and (best is None or not _is_worse(scores, best["scores"])):
            figures = {**validation, "scores": scores}
            with self._run.checkpoints.write_best(step, figures) as folder, self._named_disk_errors(folder):
                self._save_policy(folder)

    def _save_policy(self, folder: Path) -> None:
        with merged_weights(self._grpo.model) as weights:
            save_policy(self._grpo.model, self._tokenizer, folder, weights)

    @contextmanager
    def _named_disk_errors(self, folder: Path) -> Iterator[None]:
        """On a full disk, raise the usual error: torch and safetensors have their own."""
        try:
            yield
        except Exception as error:
            if shutil.disk_usage(folder).free < _DISK_FULL_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._run.path)) from error
            raise


def _is_worse(scores: Mapping[str, float], best: Mapping[str, float]) -> bool:
    """Whether the mean of the questions that both judged is lower. Of equal policies the one trained longer is kept."""
    return sum(score - best[task] for task, score in scores.items() if task in best) < -_ROUNDING
