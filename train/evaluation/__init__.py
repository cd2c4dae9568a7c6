"""Evaluates policies and explains rollouts: of a training run or of an evaluation."""

from __future__ import annotations

from typing import Any

from groundwire.train.step_timer import StepTimer

__all__ = ["ProgressCallback"]


class ProgressCallback:
    """To this a training run or an evaluation reports. It does nothing; subclasses override what they need."""

    timer: StepTimer | None = None
    """Knows what the run is busy with, if it was given."""

    def on_phase_start(self, name: str, total: int, unit: str = "rollouts") -> None:
        """A batch of rollouts begins, or an update on ``total`` trajectories."""

    def on_rollout_end(self, count: int = 1) -> None:
        """A rollout of the batch ended, or the update used ``count`` trajectories more."""

    def on_note(self, text: str) -> None:
        """Something that the user should know."""

    def on_step_end(self, metrics: dict[str, Any]) -> None:
        """A line of ``metrics.jsonl`` was written."""
