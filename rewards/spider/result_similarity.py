"""How much two query results have in common, 0 to 1: in their columns, and in their rows.

Columns are compared by content, because names and order do not matter for being right. The similarity of two columns is
the F1 score of their multisets of values; columns are paired so that its sum is largest. The similarity of two rows is
their share of equal values in paired columns; rows are paired so that its sum is largest, too. Both sums are divided by
the mean number of columns or rows of the two results, so a missing one costs as much as one too many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from groundwire.rewards.spider.assignment import assign

__all__ = ["MAX_COLUMNS", "MAX_DIFFERENT_ROWS", "similarity"]

Row = tuple[Any, ...]

MAX_COLUMNS = 16
"""Further columns of a result are not paired."""
MAX_DIFFERENT_ROWS = 48
"""Any number of equal rows is paired; of the rows without an equal one, this many of each result."""


def similarity(gold: Sequence[Row], predicted: Sequence[Row]) -> tuple[float, float]:
    """The similarity of the columns and of the rows, each 0 to 1. Two results without rows are equal.

    Pairing equal rows first loses nothing, because the number of different values is a metric. Time is bounded by the
    number of rows times :data:`MAX_COLUMNS` squared plus :data:`MAX_DIFFERENT_ROWS` cubed.
    """
    if not gold or not predicted:
        return (1.0, 1.0) if not gold and not predicted else (0.0, 0.0)
    columns = _column_gains(gold, predicted)
    pairs = [(ours, theirs) for ours, theirs in assign(columns) if columns[ours][theirs] > 0]
    shared = sum(columns[ours][theirs] for ours, theirs in pairs)
    return _share(shared, len(gold[0]), len(predicted[0])), _row_similarity(gold, predicted, pairs)


def _column_gains(gold: Sequence[Row], predicted: Sequence[Row]) -> list[list[float]]:
    ours, theirs = (
        [Counter(column) for column in list(zip(*rows, strict=True))[:MAX_COLUMNS]] for rows in (gold, predicted)
    )
    return [[_share((mine & other).total(), len(gold), len(predicted)) for other in theirs] for mine in ours]


def _row_similarity(gold: Sequence[Row], predicted: Sequence[Row], pairs: Sequence[tuple[int, int]]) -> float:
    if not pairs:
        return 0.0
    width = max(len(gold[0]), len(predicted[0]))
    ours = Counter(tuple(row[index] for index, _ in pairs) for row in gold)
    theirs = Counter(tuple(row[index] for _, index in pairs) for row in predicted)
    equal = ours & theirs
    left = [_first(rows - equal) for rows in (ours, theirs)]
    gains = [[float(sum(map(_equal, row, other))) for other in left[1]] for row in left[0]]
    values = equal.total() * len(pairs) + sum(gains[row][other] for row, other in assign(gains))
    return _share(values / width, len(gold), len(predicted))


def _first(rows: Counter[Row]) -> list[Row]:
    """The first rows by content, so that similar rows of two long results are among them."""
    distinct = sorted(rows, key=lambda row: [(type(value).__name__, repr(value)) for value in row])
    return [row for row in distinct for _ in range(rows[row])][:MAX_DIFFERENT_ROWS]


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other)


def _share(shared: float, ours: int, theirs: int) -> float:
    return 2 * shared / (ours + theirs)
