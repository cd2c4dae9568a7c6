"""Confidence intervals of accuracies, and the test for two runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

__all__ = ["bootstrap", "confidence_interval", "mcnemar", "wilson"]

_Z = 1.96  # of a 95 % interval
_RESAMPLES = 4000


def confidence_interval(questions: Collection[Sequence[float]]) -> list[float]:
    """The 95 % interval [low, high] of the mean score; [0, 1] without scores.

    ``questions`` has the scores of each question's samples. Wilson's interval if each question has one score of 0 or
    1, else a bootstrap over questions.
    """
    if all(len(scores) == 1 and scores[0] in (0.0, 1.0) for scores in questions):
        return wilson(sum(scores[0] for scores in questions), len(questions))
    return bootstrap(list(questions))


def wilson(successes: float, n: int) -> list[float]:
    """Wilson's interval [low, high] (1927) of a proportion with ``successes`` out of ``n``; [0, 1] if ``n`` is 0."""
    if n == 0:
        return [0.0, 1.0]
    share, z = successes / n, _Z
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [round(max(0.0, centre - half), 4), round(min(1.0, centre + half), 4)]


def bootstrap(questions: Sequence[Sequence[float]]) -> list[float]:
    """The 95 % percentile interval [low, high] of the mean score; [0, 1] without scores.

    Every resample draws as many questions as there are, with replacement, each with all its samples (Efron and
    Tibshirani 1993, section 8.3): samples of one question are not independent, and resampling them would make the
    interval too narrow.
    """
    import numpy as np

    scored = [scores for scores in questions if scores]
    if not scored:
        return [0.0, 1.0]
    sums = np.array([sum(scores) for scores in scored], dtype=float)
    counts = np.array([len(scores) for scores in scored], dtype=float)
    chosen = np.random.default_rng(0).integers(0, len(scored), size=(_RESAMPLES, len(scored)))
    means = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return [round(float(low), 4), round(float(high), 4)]


def mcnemar(won: int, lost: int) -> float:
    """The two-sided p-value of McNemar's exact test (1947): are ``won`` and ``lost`` the counts of a fair coin?

    It is ``2 * P(X <= min(won, lost))`` for X binomial with p = 1/2, at most 1. Ties are left out.
    """
    n, least = won + lost, min(won, lost)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(least + 1))
    return float(min(1.0, 2 * tail / 2**n))
