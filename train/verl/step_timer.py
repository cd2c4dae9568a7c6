"""Step times under verl. Its trainer calls us only to sample, so the time between two samplings counts as update."""

from __future__ import annotations

from collections import Counter

from groundwire.tools.step_timer import StepTimer

__all__ = ["VerlStepTimer"]


class VerlStepTimer(StepTimer):
    """Adds the update before a training sampling to that sampling's seconds.

    A validation between the two reports only its own seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._update: Counter[str] | None = None

    def sampling_begins(self) -> None:
        """The trainer starts to wait for rollouts."""
        seconds = self.split()
        if self._update is None:  # the first sampling: the time before it was startup
            self._update = Counter()
        else:
            self.leave("update")
            self._update.update(seconds)

    def sampling_ends(self, *, training: bool) -> dict[str, float]:
        """The rollouts are complete. Returns each phase's seconds; a training's include those of the last update.

        Until :meth:`update_begins` the rollouts are written to disk, which does not count as update.
        """
        seconds = Counter(self.split())
        if training and self._update is not None:
            seconds.update(self._update)
            self._update.clear()
        return dict(seconds)

    def update_begins(self) -> None:
        """The trainer has the rollouts and goes on."""
        self.enter("update")
