"""A step's time, where verl's trainer is seen only when it samples: what it does in between is its update."""

from __future__ import annotations

from collections import Counter

from groundwire.tools.step_timer import StepTimer

__all__ = ["VerlStepTimer"]


class VerlStepTimer(StepTimer):
    """Laps from the middle of a step to the middle of the next: the update before a sampling belongs to it.

    A validation comes between the two. Its lap is its own, and the update is left to the sampling after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._update: Counter[str] | None = None

    def sampling_begins(self) -> None:
        """The trainer waits for rollouts from here on."""
        seconds = self.split()
        if self._update is None:  # the first time, and what was before is the start
            self._update = Counter()
        else:
            self.leave("update")
            self._update.update(seconds)

    def sampling_ends(self, *, training: bool) -> dict[str, float]:
        """It has them. Returns the seconds of each part, of a training's sampling with those of the update before.

        Until :meth:`update_begins` nothing is trained: the rollouts are written down.
        """
        seconds = Counter(self.split())
        if training and self._update is not None:
            seconds.update(self._update)
            self._update.clear()
        return dict(seconds)

    def update_begins(self) -> None:
        """The trainer goes on from here."""
        self.enter("update")
