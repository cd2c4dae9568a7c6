"""Prompts with replies packed into rows, and rows into forward passes of a bounded size: of the update, and of SFT."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from groundwire.train.algorithms.credit import TrainingItem
from groundwire.train.local.update.packing import Branch

__all__ = ["Row", "WeightedItem", "forward_batches", "make_rows"]


class _Packable(Protocol):
    """A prompt and what follows it; ``mask`` is 1 for a token of ``response_ids`` that is trained."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def response_ids(self) -> list[int]: ...
    @property
    def mask(self) -> list[int]: ...


Item = TypeVar("Item", bound=_Packable)


@dataclass(frozen=True, kw_only=True)
class WeightedItem(TrainingItem):
    """A trajectory in a minibatch."""

    weight: float
    """Of each trained token in the policy loss."""
    penalty: float
    """Of each trained token in the KL and entropy terms."""

    @property
    def prompt_ids(self) -> list[int]:
        """The trajectory's."""
        return self.trajectory.prompt_ids

    @property
    def response_ids(self) -> list[int]:
        """The trajectory's."""
        return self.trajectory.response_ids


@dataclass(frozen=True)
class Row(Generic[Item]):
    """Items that are packed after a shared prefix of their prompts."""

    prefix: list[int]
    items: list[Item]

    @property
    def branches(self) -> list[Branch]:
        """The items' tokens after the prefix, with the masks of their targets."""
        start = len(self.prefix)
        return [
            (item.prompt_ids[start:] + item.response_ids, [0] * (len(item.prompt_ids) - start) + item.mask)
            for item in self.items
        ]

    @property
    def length(self) -> int:
        """The number of tokens."""
        start = len(self.prefix)
        return start + sum(len(item.prompt_ids) + len(item.response_ids) - start for item in self.items)

    @property
    def targets(self) -> int:
        """The number of trained tokens."""
        return sum(sum(item.mask) for item in self.items)


def make_rows(items: Sequence[Item], *, tokens: int, branches: int = sys.maxsize) -> list[Row[Item]]:
    """Rows of at most ``branches`` items and ``tokens`` tokens; a longer item has a row of its own.

    Sorting puts items with long common prefixes next to each other.
    """
    rows: list[Row[Item]] = []
    for item in sorted(items, key=lambda item: item.prompt_ids):
        prompt = item.prompt_ids
        if rows and len(rows[-1].items) < branches:
            shared = _common_prefix(rows[-1].prefix, prompt)
            longer = Row(rows[-1].prefix[:shared], [*rows[-1].items, item])
            # With a prefix of less than half the prompt, which is another schema, packing saves nothing.
            if 2 * shared >= len(prompt) and longer.length <= tokens:
                rows[-1] = longer
                continue
        rows.append(Row(prompt, [item]))
    return rows


def forward_batches(rows: Sequence[Row[Item]], tokens: int, *, padded: bool = True) -> Iterator[list[Row[Item]]]:
    """Batches of at most ``tokens`` ids; a longer row is a batch by itself.

    ``padded`` rows are as long as the longest of their batch, so rows of similar length are put together.
    """
    batch: list[Row[Item]] = []
    for row in sorted(rows, key=lambda row: row.length) if padded else rows:
        size = row.length * (len(batch) + 1) if padded else sum(each.length for each in [*batch, row])
        if batch and size > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of ``a`` and ``b``."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
