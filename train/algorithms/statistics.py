"""Confidence intervals of accuracies and of their differences, pass@k, and the test for two runs.

A bootstrap of equal scores has no width, whatever their number. So proportions have Wilson's interval, their paired
differences Newcombe's, and equal scores in between the interval of a proportion with the same mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

__all__ = ["bootstrap", "confidence_interval", "mcnemar", "paired_interval", "pass_at_k", "wilson"]

_Z = 1.96  # of a 95 % interval
_RESAMPLES = 4000


def confidence_interval(questions: Collection[Sequence[float]]) -> list[float]:
    """The 95 % interval [low, high] of the mean score; [0, 1] without scores.

    ``questions`` has the scores of each question's samples. Scores of 0 and 1 have Wilson's interval, others a
    bootstrap over questions. Samples of one question are not independent: several count as many as have the same
    variance (the design effect; Kish 1965), at least one for each question.
    """
    scored = [scores for scores in questions if scores]
    values = [value for scores in scored for value in scores]
    if all(value in (0.0, 1.0) for value in values):
        n = _effective_samples(scored)
        return wilson(n * sum(values) / max(1, len(values)), n)
    interval = bootstrap(scored)
    if interval[0] == interval[1] and all(0 <= value <= 1 for value in values):  # no score of [0, 1] varies more
        return wilson(sum(sum(scores) / len(scores) for scores in scored), len(scored))
    return interval


def _effective_samples(questions: Sequence[Sequence[float]]) -> float:
    """How many independent samples have the variance of these, from the number of questions to that of samples."""
    k, n = len(questions), sum(map(len, questions))
    mean = sum(map(sum, questions)) / max(1, n)
    spread = sum((sum(scores) - len(scores) * mean) ** 2 for scores in questions)
    if k < 2 or not spread:
        return k
    return min(n, max(k, mean * (1 - mean) * n * n * (k - 1) / (spread * k)))


def wilson(successes: float, n: float) -> list[float]:
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


def paired_interval(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """The 95 % interval [low, high] of the mean of ``after - before``; ``pairs`` are the mean scores of each question.

    Newcombe's interval (1998, Statistics in Medicine 17:2635, method 10) if all scores are 0 or 1, else a bootstrap
    over questions. [-1, 1] without pairs.
    """
    if all(score in (0.0, 1.0) for pair in pairs for score in pair):
        return _newcombe(pairs)
    interval = bootstrap([[after - before] for before, after in pairs])
    if interval[0] == interval[1] and all(0 <= score <= 1 for pair in pairs for score in pair):
        return _newcombe(pairs)
    return interval


def _newcombe(pairs: Sequence[tuple[float, float]]) -> list[float]:
    n = len(pairs)
    if not n:
        return [-1.0, 1.0]
    before, after = (sum(pair[run] for pair in pairs) / n for run in (0, 1))
    (low_0, high_0), (low_1, high_1) = wilson(n * before, n), wilson(n * after, n)
    both = sum(a * b for a, b in pairs)
    neither = sum((1 - a) * (1 - b) for a, b in pairs)
    product = both * neither - (n * after - both) * (n * before - both)
    variance = before * (1 - before) * after * (1 - after)
    corrected = max(product - n / 2, 0.0) if product > 0 else product
    phi = corrected / (n * n * math.sqrt(variance)) if variance > 0 else 0.0

    def distance(of_after: float, of_before: float) -> float:
        return math.sqrt(max(0.0, of_after**2 - 2 * phi * of_after * of_before + of_before**2))

    low = after - before - distance(after - low_1, high_0 - before)
    high = after - before + distance(high_1 - after, before - low_0)
    return [round(max(-1.0, low), 4), round(min(1.0, high), 4)]


def pass_at_k(questions: Collection[Sequence[bool]], k: int) -> float | None:
    """The probability that at least one of ``k`` samples of a question is right, as a mean over questions.

    The unbiased estimate ``1 - C(n - c, k) / C(n, k)`` for ``c`` right samples of ``n`` (Chen et al. 2021,
    arXiv:2107.03374). Questions with fewer than ``k`` samples are left out; None if no question has as many.
    """
    enough = [samples for samples in questions if len(samples) >= k]
    missed = [math.comb(len(samples) - sum(samples), k) / math.comb(len(samples), k) for samples in enough]
    return 1 - sum(missed) / len(missed) if missed else None


def mcnemar(won: int, lost: int) -> float:
    """The two-sided p-value of McNemar's exact test (1947): are ``won`` and ``lost`` the counts of a fair coin?

    It is ``2 * P(X <= min(won, lost))`` for X binomial with p = 1/2, at most 1. Ties are left out.
    """
    n, least = won + lost, min(won, lost)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(least + 1))
    return float(min(1.0, 2 * tail / 2**n))
