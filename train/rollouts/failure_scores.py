"""What failed rollouts score. It depends on the rewards of the run: no failure may be better than a wrong answer."""

from __future__ import annotations

from collections.abc import Sequence

from groundwire.rewards import RewardError
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.failures import failure_scores
from groundwire.train.rollouts.errors import UnreadableAnswerError
from groundwire.train.store.rollout import Rollout

__all__ = ["FailureScores"]


class FailureScores:
    """``failures`` is the setting of that name. What ``run`` has sampled so far counts, also in validations."""

    def __init__(self, failures: str = "", run: RunDir | None = None) -> None:
        self._scores = failure_scores(failures)
        self.least = 0.0
        """The least value that the reward declares or has given in this run; 0 if none is lower."""
        self._has_scored = False
        self._unproven: list[Rollout] = []
        """Those whose reward raised about the answer when it had scored no other answer yet."""
        for rollouts in run.rollout_batches(["status", "reward"], []) if run is not None else ():
            self._add([rollout.outcome.reward for rollout in rollouts if rollout.succeeded])

    def settle(self, rollouts: Sequence[Rollout]) -> None:
        """Give a score to those that failed. Rollouts that are compared are settled together.

        What a reward raises about an answer counts once it has scored another; until then the reward may be broken.
        """
        self._add([rollout.outcome.reward for rollout in rollouts if rollout.succeeded])
        self.least = min([self.least, *(rollout.outcome.least_reward for rollout in rollouts)])
        for rollout in rollouts:
            outcome = rollout.outcome
            if outcome.failure == UnreadableAnswerError.kind and not self._has_scored:
                outcome.failure = RewardError.kind
                self._unproven.append(rollout)
            if outcome.failure:
                outcome.reward = self._score(outcome.failure)

    def _add(self, rewards: Sequence[float | None]) -> None:
        self.least = min([self.least, *filter(None, rewards)])
        self._has_scored = self._has_scored or bool(rewards)
        if self._has_scored:
            for rollout in self._unproven:
                rollout.outcome.failure = UnreadableAnswerError.kind
                rollout.outcome.reward = self._score(UnreadableAnswerError.kind)
            self._unproven.clear()

    def _score(self, failure: str) -> float | None:
        score = self._scores.get(failure)
        return self.least if score is None and failure in self._scores else score
