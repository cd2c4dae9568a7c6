"""Evaluates policies and explains rollouts: of a training run or of an evaluation."""

from __future__ import annotations

from typing import Any

__all__ = ["ProgressCallback"]


class ProgressCallback:
    """To this a training run or an evaluation reports. It does nothing; subclasses override what they need."""

    def on_phase_start(self, name: str, rollouts: int) -> None:
        """A batch of rollouts begins."""

    def on_rollout_end(self) -> None:
        """A rollout of the batch ended."""

    def on_note(self, text: str) -> None:
        """Something that the user should know."""

    def on_step_end(self, metrics: dict[str, Any]) -> None:
        """A line of ``metrics.jsonl`` was written."""
