"""The metrics of BIRD's official evaluator on two results or two lists of running times.

From bird-bench/mini_dev, ``evaluation_ex.py``, ``evaluation_f1.py`` and ``evaluation_ves.py`` of 2025, in other words:
``tests/data/make_bird.py`` records that evaluator's own verdicts for the tests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["efficiency_reward", "execution_accuracy", "r_ves", "soft_f1", "time_ratio"]

Row = tuple[Any, ...]
_TIERS = ((2.0, 1.25), (1.0, 1.0), (0.5, 0.75), (0.25, 0.5))
_SLOWEST = 0.25


def execution_accuracy(gold: Iterable[Row], predicted: Iterable[Row]) -> float:
    """EX: 1.0 if both results have the same set of rows, else 0.0. Columns have an order, rows have none."""
    return float(set(gold) == set(predicted))


def soft_f1(gold: Sequence[Row], predicted: Sequence[Row]) -> float:
    """Soft F1, 0 to 1: the agreement of the distinct rows at the same positions.

    Of two such rows the values that the other one has are true positives, the others false positives or false
    negatives, each divided by the number of gold columns. A row without a partner counts 1.
    """
    if not gold and not predicted:
        return 1.0
    ours, theirs = list(dict.fromkeys(gold)), list(dict.fromkeys(predicted))
    true_positives, errors = 0.0, float(abs(len(ours) - len(theirs)))
    for mine, other in zip(ours, theirs, strict=False):
        found = sum(value in mine for value in other)
        missing = sum(value not in other for value in mine)
        true_positives += found / len(mine)
        errors += (len(other) - found + missing) / len(mine)
    return 2 * true_positives / (2 * true_positives + errors)


def time_ratio(gold_times: Sequence[float], predicted_times: Sequence[float]) -> float:
    """How many times faster the prediction is: the mean ratio of paired times, without outliers of three deviations."""
    ratios = [gold / predicted for gold, predicted in zip(gold_times, predicted_times, strict=True)]
    mean, limit = statistics.fmean(ratios), 3 * statistics.pstdev(ratios)
    # Officially equal ratios have no mean: all are outliers of a deviation of 0, and the verdict is an error.
    return statistics.fmean([ratio for ratio in ratios if abs(ratio - mean) < limit] or ratios)


def efficiency_reward(ratio: float) -> float:
    """R-VES' reward of a right prediction that is ``ratio`` times as fast as the gold: 1.25, 1, 0.75, 0.5 or 0.25."""
    return next((reward for least, reward in _TIERS if ratio >= least), _SLOWEST)


def r_ves(rewards: Sequence[float]) -> float:
    """R-VES of all predictions, 0 to 112: the mean square root of their rewards, 0 for wrong ones, times 100."""
    return 100 * statistics.fmean(math.sqrt(reward) for reward in rewards)
