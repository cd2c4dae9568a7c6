"""Confidence intervals of accuracies and of their differences, pass@k, and the test for two runs.

Few scores do not show how far others reach: of five answers that are right in 12 % of the cases, half of the time none
is, and every bootstrap draws from equally wrong ones. So proportions have Wilson's interval, their paired differences
Newcombe's, and other scores an interval that counts one more score at the end of their range.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

FEW_QUESTIONS = 20
"""With fewer questions a mean says little, whatever its interval."""
_Z = 1.96  # of a 95 % interval
_DRAWS = 4000
_NUMBERS_AT_ONCE = 1 << 22  # of random numbers, 32 MiB


def confidence_interval(questions: Collection[Sequence[float]]) -> list[float]:
    """The 95 % interval [low, high] of the mean score; [0, 1] without scores.

    ``questions`` has the scores of each question's samples, which are not independent: only questions are. Questions
    that are all right or all wrong have Wilson's interval, others :func:`bounded_interval`.
    """
    scored = [scores for scores in questions if scores]
    means = [sum(scores) / len(scores) for scores in scored]
    if all(mean in (0.0, 1.0) for mean in means):
        return wilson(sum(means), len(means))
    return bounded_interval(scored, _score_range(value for scores in scored for value in scores))


def _score_range(scores: Iterable[float]) -> tuple[float, float]:
    """From 0 to 1, from -1 if a score is negative, and as far as the scores reach."""
    seen = list(scores)
    low = min(seen)
    return min(low, -1.0 if low < 0 else 0.0), max(1.0, *seen)


def bounded_interval(questions: Sequence[Sequence[float]], ends: tuple[float, float]) -> list[float]:
    """The 95 % interval [low, high] of the mean of scores that lie between two ``ends``.

    Each end of the interval is a quantile of the mean under random weights of the questions (Rubin 1981, "The Bayesian
    bootstrap") and of one more question at that end of the scores' range: Gaffke's bound (2005, Mathematical Methods of
    Statistics 14:206; Phan et al. 2021, "Towards Practical Mean Bounds for Small Samples", arXiv:2106.03163). Of scores
    of 0 and 1 it is Clopper and Pearson's.
    """
    import numpy as np

    sums = np.array([sum(scores) for scores in questions], dtype=float)
    counts = np.array([len(scores) for scores in questions], dtype=float)
    random, drawn = np.random.default_rng(0), []
    rows = max(1, min(_DRAWS, _NUMBERS_AT_ONCE // (len(sums) + 1)))
    for start in range(0, _DRAWS, rows):
        weights = random.standard_exponential((min(rows, _DRAWS - start), len(sums) + 1))
        further = weights[:, -1] * counts.mean()
        total = weights[:, :-1] @ counts + further
        drawn.append([(weights[:, :-1] @ sums + further * end) / total for end in ends])
    low, high = (np.concatenate(means) for means in zip(*drawn, strict=True))
    return [round(float(np.quantile(low, 0.025)), 4), round(float(np.quantile(high, 0.975)), 4)]


def wilson(successes: float, n: float) -> list[float]:
    """Wilson's interval [low, high] (1927) of a proportion with ``successes`` out of ``n``; [0, 1] if ``n`` is 0."""
    if n == 0:
        return [0.0, 1.0]
    share, z = successes / n, _Z
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [round(max(0.0, centre - half), 4), round(min(1.0, centre + half), 4)]


def paired_interval(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """The 95 % interval [low, high] of the mean of ``after - before``; ``pairs`` are the mean scores of each question.

    Newcombe's interval (1998, Statistics in Medicine 17:2635, method 10) if all scores are 0 or 1, else
    :func:`bounded_interval`. [-1, 1] without pairs.
    """
    if all(score in (0.0, 1.0) for pair in pairs for score in pair):
        return _newcombe(pairs)
    low, high = _score_range(score for pair in pairs for score in pair)
    return bounded_interval([[after - before] for before, after in pairs], (low - high, high - low))


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
