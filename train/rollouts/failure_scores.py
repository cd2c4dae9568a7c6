"""What failed rollouts score. It depends on the rewards of the run: no failure may be better than a wrong answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from groundwire.rewards import RewardError
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.failures import failure_scores
from groundwire.train.rollouts.errors import UnreadableAnswerError
from groundwire.train.rollouts.outcome import RolloutResult

__all__ = ["FailureScores"]


class FailureScores:
    """``failures`` is the setting of that name. What ``run`` has sampled so far counts, also in validations."""

    def __init__(self, failures: str = "", run: RunDir | None = None) -> None:
        self._scores = failure_scores(failures)
        self.least = 0.0
        """The least value that the reward declares or has given in this run; 0 if none is lower."""
        self._has_scored = False
        for rows in run.rollout_batches(["status", "reward"], []) if run is not None else ():
            self._add([row["reward"] for row in rows if row["status"] == "succeeded" and row["reward"] is not None])

    def settle(self, results: Sequence[RolloutResult]) -> list[RolloutResult]:
        """The results with the rewards of those that failed. Results that are compared are settled together.

        What a reward raises about an answer counts once it has scored another; until then the reward may be broken.
        """
        self._add([result.reward for result in results if result.succeeded and result.reward is not None])
        self.least = min([self.least, *(result.least_reward for result in results)])
        return [result if result.succeeded else self._settled(result) for result in results]

    def _add(self, rewards: Sequence[float]) -> None:
        self._has_scored = self._has_scored or bool(rewards)
        self.least = min([self.least, *rewards])

    def _settled(self, failed: RolloutResult) -> RolloutResult:
        unproven = failed.status == UnreadableAnswerError.kind and not self._has_scored
        status = RewardError.kind if unproven else failed.status
        score = self._scores.get(status)
        reward = self.least if score is None and status in self._scores else score
        return replace(failed, status=status, reward=reward)
