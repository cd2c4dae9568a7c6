"""BIRD's metrics of a prediction, made safe to train on.

| reward | value |
|---|---|
| ``bird_exec_match`` | EX: 1 if the sets of rows are equal |
| ``bird_soft_f1`` | Soft F1 |
| ``bird_r_ves`` | 0 if EX is 0, else the square root of R-VES' reward, by running times: for evaluations |
| ``bird_efficiency`` | the same by the steps of SQLite's virtual machine: deterministic, for training |

The mean of ``bird_r_ves`` times 100 is R-VES. Mode ``official`` gives the official scores; ``safe``, the default, gives
0 to a query that reads no table if the gold reads one. In both modes a statement that does not only read scores 0, and
so does a result of more than 250,000 rows or 4 MB: officially these run. A query may take 30 s, as officially.

In training a query must also be right on the gold's variants (:mod:`groundwire.rewards._sql`): Soft F1 is the
least on any database, and efficiency is 0 for a query that is wrong on one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from groundwire.rewards._sql import sql_reward
from groundwire.rewards._types import RewardError
from groundwire.rewards.spider.execution_match import gold_result, reads_table
from groundwire.tools.sql import MAX_JUDGED_BYTES, MAX_JUDGED_ROWS, DatabaseError, QueryError, QueryResult, run_query

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
    expected, returned = list(dict.fromkeys(gold)), list(dict.fromkeys(predicted))
    true_positives, errors = 0.0, float(abs(len(expected) - len(returned)))
    for mine, other in zip(expected, returned, strict=False):
        matches = sum(value in mine for value in other)
        missing = sum(value not in other for value in mine)
        true_positives += matches / len(mine)
        errors += (len(other) - matches + missing) / len(mine)
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


Mode = Literal["safe", "official"]
TIMEOUT_S = 30.0
_ITERATIONS = 100
_FEW_STEPS = 1000
_EQUAL = 0.05
"""Steps that differ by this share count as equal: one index more or less in a plan is no merit and no fault."""


def exec_match(predicted: str, gold: str, database: str, *, mode: Mode = "safe") -> float:
    """EX, 1.0 or 0.0. Raises :class:`rewards.RewardError` if the gold fails or the database cannot be read."""
    expected, result = _results(predicted, gold, database, mode)
    return execution_accuracy(expected.rows, result.rows) if result else 0.0


def soft_match(predicted: str, gold: str, database: str, *, mode: Mode = "safe") -> float:
    """Soft F1, 0 to 1. Raises as :func:`exec_match`."""
    expected, result = _results(predicted, gold, database, mode)
    return soft_f1(expected.rows, result.rows) if result else 0.0


def efficiency(predicted: str, gold: str, database: str, *, clock: Literal["steps", "time"] = "steps") -> float:
    """The square root of R-VES' reward: 0.0 for a wrong prediction, else 0.5 to 1.118. Raises as :func:`exec_match`.

    By ``time``, gold and prediction run a hundred times each, as officially. By ``steps`` they run once; less than a
    thousand steps make no difference, and five per cent neither.
    """
    expected, result = _results(predicted, gold, database, "safe")
    if result is None or not execution_accuracy(expected.rows, result.rows):
        return 0.0
    if clock == "steps":
        ratio = (_FEW_STEPS + expected.vm_steps) / (_FEW_STEPS + result.vm_steps)
        return math.sqrt(efficiency_reward(1.0 if abs(ratio - 1) <= _EQUAL else ratio))
    try:
        times = [[_run(sql, database).elapsed_s for sql in (gold, predicted)] for _ in range(_ITERATIONS)]
    except QueryError as error:
        raise RewardError(f"a query that was in time is too slow now: {error}") from error
    return math.sqrt(efficiency_reward(time_ratio(*zip(*times, strict=True))))


def _results(predicted: str, gold: str, database: str, mode: Mode) -> tuple[QueryResult, QueryResult | None]:
    """The results of gold and prediction, which has none if it fails, is too large or does not use the data."""
    expected = gold_result(gold, database, TIMEOUT_S)
    try:
        result = _run(predicted, database)
    except DatabaseError as error:
        raise RewardError(str(error)) from error
    except QueryError:
        return expected, None
    if result.truncated or (mode == "safe" and not reads_table(database, predicted) and reads_table(database, gold)):
        return expected, None
    return expected, result


def _run(sql: str, database: str) -> QueryResult:
    return run_query(database, sql, timeout_s=TIMEOUT_S, max_rows=MAX_JUDGED_ROWS, max_bytes=MAX_JUDGED_BYTES)


def _worth(predicted: str, gold: str, variant: str) -> float:
    """0 for a query that is wrong on a variant; else more than any value, so the value on the database counts."""
    return 2 * exec_match(predicted, gold, variant, mode="official")


bird_exec_match = sql_reward("bird_exec_match", exec_match, _worth)
bird_soft_f1 = sql_reward("bird_soft_f1", soft_match, partial(soft_match, mode="official"))
bird_r_ves = sql_reward("bird_r_ves", partial(efficiency, clock="time"), _worth)
bird_efficiency = sql_reward("bird_efficiency", efficiency, _worth)
