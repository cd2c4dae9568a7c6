"""The interface through which a training run or an evaluation reports its progress."""

from __future__ import annotations

from typing import Any

__all__ = ["ProgressCallback"]


class ProgressCallback:
    """Does nothing; subclasses override the methods that they need."""

    def on_phase_start(self, name: str, rollouts: int) -> None:
        """A batch of rollouts begins."""

    def on_rollout_end(self) -> None:
        """A rollout of the batch ended."""

    def on_note(self, text: str) -> None:
        """Something that the user should know."""

    def on_step_end(self, metrics: dict[str, Any]) -> None:
        """A line of ``metrics.jsonl`` was written."""
