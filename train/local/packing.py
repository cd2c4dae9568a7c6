"""Prefix-shared packing: many short continuations of one long prompt in one row.

The schema is most of a prompt, and every question about a database, every turn of a rollout and every rollout of a
group begins with it. A row holds this prefix once. Each branch after it attends to the prefix and to itself (a tree
mask), and its positions continue from the prefix. The logits equal those of separate passes, for a third of the tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groundwire.train.algorithms.credit import TrainingItem
from groundwire.train.algorithms.token_logprobs import Head
from groundwire.train.policy.attention import TREE, tree_block_mask


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
class Row:
    """Items that are packed after a shared prefix of their prompts: a :class:`WeightedItem`, or an example to imitate.

    Each has ``prompt_ids``, ``response_ids``, and a ``mask``: 1 for a token of ``response_ids`` that is trained.
    """

    prefix: list[int]
    items: list[Any]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The positions of its tokens in their sequences: of the prefix, and of each branch after it."""
        start = len(self.prefix)
        return [(0, start), *((start, len(item.prompt_ids) + len(item.response_ids)) for item in self.items)]

    @property
    def length(self) -> int:
        """The number of tokens."""
        return sum(end - start for start, end in self.spans)

    @property
    def targets(self) -> int:
        """The number of trained tokens."""
        return sum(sum(item.mask) for item in self.items)


def make_rows(items: Sequence[Any], *, tokens: int, branches: int = sys.maxsize) -> list[Row]:
    """Rows of at most ``branches`` items and ``tokens`` tokens; a longer item has a row of its own.

    Sorting puts items with long common prefixes next to each other.
    """
    rows: list[Row] = []
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


def forward_batches(rows: Sequence[Row], tokens: int, *, padded: bool = True) -> Iterator[list[Row]]:
    """Batches of at most ``tokens`` ids; a longer row is a batch by itself.

    ``padded`` rows are as long as the longest of their batch, so rows of similar length are put together.
    """
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: row.length) if padded else rows:
        size = row.length * (len(batch) + 1) if padded else sum(packed.length for packed in [*batch, row])
        if batch and size > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


class Packed(NamedTuple):
    """``B`` rows of ``T`` ids, and the ``M`` targets in them, in the order of the items."""

    ids: Tensor
    """int64 [B, T]"""
    positions: Tensor
    """int64 [B, T]; every item goes on after the prefix"""
    end: Tensor
    """int64 [B, T]: the column after the last token that attends to a token: of its item, or after all of its row"""
    index: Tensor
    """int64 [M, 2]: row and column of the position that predicts each target"""
    targets: Tensor
    """int64 [M]"""


def pack(rows: Sequence[Row], *, one_row: bool = False, device: Any = "cpu") -> Packed:
    """The ids of rows on ``device``. The last token of a prefix predicts the first token of each item after it.

    ``one_row`` puts all of them into one row instead, for attention that skips what a mask excludes.
    """
    lengths = [row.length for row in rows]
    shape = (1, sum(lengths)) if one_row else (len(rows), max(lengths))
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    ends = torch.full(shape, shape[1])
    index: list[tuple[int, int]] = []
    targets: list[int] = []
    first = 0  # the column of the next prefix
    for number, row in enumerate(rows):
        place, shared = 0 if one_row else number, len(row.prefix)
        start = end = first + shared
        ids[place, first:start] = torch.tensor(row.prefix)
        positions[place, first:start] = torch.arange(shared)
        ends[place, first:start] = first + lengths[number]
        for item in row.items:
            tokens = item.prompt_ids[shared:] + item.response_ids
            begin, end = end, end + len(tokens)
            ids[place, begin:end] = torch.tensor(tokens)
            positions[place, begin:end] = torch.arange(shared, shared + len(tokens))
            ends[place, begin:end] = end
            for offset, is_trained in enumerate(item.mask, len(item.prompt_ids) - shared):
                if is_trained:
                    index.append((place, begin + offset - 1 if offset else start - 1))
                    targets.append(tokens[offset])
        first = end if one_row else 0
    tensors = ids, positions, ends, ids.new_tensor(index).view(-1, 2), ids.new_tensor(targets)
    return Packed(*(tensor.to(device) for tensor in tensors))


def packed_hidden(model: Any, packed: Packed) -> Tensor:
    """[M, width]: the last hidden states at the positions that predict ``packed.targets``.

    Raises :class:`ValueError` for branches in a row of a model without :data:`TREE`, which would mix them.
    """
    if model.config._attn_implementation == TREE:
        mask: Any = tree_block_mask(packed.end, packed.positions)
    else:
        mask = packed.positions == torch.arange(packed.ids.shape[1], device=packed.ids.device)
        if (packed.positions[~mask] > 0).any():
            raise ValueError(f"{type(model).__name__} has no attention for several branches in a row: give one each")
    hidden = model.base_model(
        input_ids=packed.ids, position_ids=packed.positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return hidden[packed.index[:, 0], packed.index[:, 1]]


def packed_logits(model: Any, packed: Packed) -> Tensor:
    """float32 [M, vocabulary]: the logits that predict ``packed.targets``."""
    return Head(model)(packed_hidden(model, packed)).float()
