"""The assignment problem: pair rows with columns of a matrix, each at most once, with the largest sum."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign"]


def assign(gains: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The pairs ``(row, column)`` with the largest sum of ``gains``: min(rows, columns) pairs, ordered by row.

    The Hungarian method with potentials and shortest augmenting paths (Jonker and Volgenant, 1987), in O(rows² columns)
    for the shorter side as rows. Equal sums are decided by position, so the result is deterministic.
    """
    if not gains or not gains[0]:
        return []
    if len(gains) > len(gains[0]):
        return sorted((row, column) for column, row in assign(list(zip(*gains, strict=True))))
    rows, columns = len(gains), len(gains[0])
    row_potential, column_potential = [0.0] * rows, [0.0] * (columns + 1)
    row_of = [-1] * (columns + 1)  # the last column is virtual: it holds the row that looks for a column
    for new_row in range(rows):
        row_of[columns] = new_row
        current = columns
        slack, previous = [float("inf")] * columns, [columns] * columns
        visited = [False] * (columns + 1)
        while row_of[current] >= 0:
            visited[current] = True
            row, best, step = row_of[current], -1, float("inf")
            for column in range(columns):
                if visited[column]:
                    continue
                reduced = -gains[row][column] - row_potential[row] - column_potential[column]
                if reduced < slack[column]:
                    slack[column], previous[column] = reduced, current
                if slack[column] < step:
                    best, step = column, slack[column]
            for column in range(columns + 1):
                if visited[column]:
                    row_potential[row_of[column]] += step
                    column_potential[column] -= step
                elif column < columns:
                    slack[column] -= step
            current = best
        while current != columns:
            row_of[current] = row_of[previous[current]]
            current = previous[current]
    return sorted((row, column) for column, row in enumerate(row_of[:columns]) if row >= 0)
