"""The two pieces of statistics that an evaluation needs, with their assumptions said.

The bootstrap resamples questions, not rollouts: several samples of one question are not independent of each other, and
an interval that took them for it would be too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["bootstrap", "mcnemar"]

_RESAMPLES = 4000


def bootstrap(questions: Sequence[Sequence[float]], *, seed: int = 0, resamples: int = _RESAMPLES) -> list[float]:
    """The 95 % percentile interval [low, high] of the mean score; [0, 1] for no question.

    ``questions`` has the scores of each question's samples. Every resample draws as many questions as there are, with
    replacement, each with all its samples (Efron and Tibshirani 1993, section 8.3). With one seed the answer is one.
    """
    import numpy as np

    scored = [scores for scores in questions if scores]
    if not scored:
        return [0.0, 1.0]
    sums = np.array([sum(scores) for scores in scored], dtype=float)
    counts = np.array([len(scores) for scores in scored], dtype=float)
    chosen = np.random.default_rng(seed).integers(0, len(scored), size=(resamples, len(scored)))
    means = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return [round(float(low), 4), round(float(high), 4)]


def mcnemar(won: int, lost: int) -> float:
    """The two-sided p-value of McNemar's exact test: could ``won`` against ``lost`` be a fair coin's?

    Questions on which both did alike say nothing. ``2 * P(X <= min(won, lost))`` for X binomial with p = 1/2, at most
    1 (McNemar 1947, in its exact form; the same as a sign test over the questions that differ).
    """
    n, least = won + lost, min(won, lost)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(least + 1))
    return float(min(1.0, 2 * tail / 2**n))
