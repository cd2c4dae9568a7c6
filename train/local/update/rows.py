"""Trajectories packed into rows, and rows into forward passes of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from groundwire.train.algorithms.credit import TrainingItem
from groundwire.train.local.update.packing import Branch

__all__ = ["Row", "WeightedItem", "forward_batches", "make_rows"]


@dataclass(frozen=True, kw_only=True)
class WeightedItem(TrainingItem):
    """A trajectory in a minibatch."""

    weight: float
    """Of each trained token in the policy loss."""
    penalty: float
    """Of each trained token in the KL and entropy terms."""


@dataclass(frozen=True)
class Row:
    """Trajectories that are packed after a shared prefix."""

    prefix: list[int]
    items: list[WeightedItem]

    @property
    def branches(self) -> list[Branch]:
        """The items' tokens after the prefix, with the masks of their targets."""
        start = len(self.prefix)
        return [
            (
                item.trajectory.prompt_ids[start:] + item.trajectory.response_ids,
                [0] * (len(item.trajectory.prompt_ids) - start) + item.mask,
            )
            for item in self.items
        ]

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.prefix) + sum(len(item.trajectory) - len(self.prefix) for item in self.items)


def make_rows(items: Sequence[WeightedItem], *, branches: int, tokens: int) -> list[Row]:
    """Rows of at most ``branches`` items and ``tokens`` tokens; a longer item has a row of its own.

    Sorting puts trajectories with long common prefixes next to each other.
    """
    rows: list[Row] = []
    for item in sorted(items, key=lambda item: item.trajectory.prompt_ids):
        prompt = item.trajectory.prompt_ids
        if rows and len(rows[-1].items) < branches:
            shared = _common_prefix(rows[-1].prefix, prompt)
            longer = Row(rows[-1].prefix[:shared], [*rows[-1].items, item])
            # With a prefix of less than half the prompt, which is another schema, packing saves nothing.
            if 2 * shared >= len(prompt) and longer.length <= tokens:
                rows[-1] = longer
                continue
        rows.append(Row(prompt, [item]))
    return rows


def forward_batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Batches of rows of similar length, of at most ``tokens`` ids with padding; a longer row is a batch by itself."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: row.length):
        if batch and row.length * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of ``a`` and ``b``."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
