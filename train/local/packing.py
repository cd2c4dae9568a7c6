"""Prefix-shared packing: many short continuations of one long prompt in one row.

The schema is most of a prompt, and every question about a database, every turn of a rollout and every rollout of a
group begins with it. A row holds the prefix once; each branch behind it sees the prefix and itself (a tree mask), and
its positions go on from the prefix. The result is the same as running every branch alone, for a third of the tokens.

Attention over a row is quadratic, so branches are spread over several rows of at most ``max_branches``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

__all__ = ["Branch", "Packed", "Rows", "lay_out", "pack", "packed_logits", "split", "tree_mask"]

Branch = tuple[Sequence[int], Sequence[int]]
"""Token ids, and a mask of the same length: 1 where the token is a target (it was sampled), 0 where it is context."""


class Packed(NamedTuple):
    """``B`` rows of ``T`` ids, and the ``M`` targets in them, in the order of the branches."""

    ids: Tensor
    """int64 [B, T]"""
    positions: Tensor
    """int64 [B, T]; restart behind the prefix in every branch"""
    mask: Tensor
    """bool [B, 1, T, T]; True where the query (third axis) sees the key (last axis)"""
    index: Tensor
    """int64 [M, 2]: row and column of the position that predicts each target"""
    targets: Tensor
    """int64 [M]"""
    branch: Tensor
    """int64 [M]: number of the target's branch, counted over all rows"""


class Rows(NamedTuple):
    """What :class:`Packed` is made of, without the mask, which is most of its bytes; see there."""

    ids: Tensor
    positions: Tensor
    segment: Tensor
    """int64 [B, T]: -1 padding, 0 prefix, then the branches of the row"""
    index: Tensor
    targets: Tensor
    branch: Tensor


def pack(sequences: Sequence[tuple[Sequence[int], Sequence[Branch]]], *, pad: int = 0) -> Packed:
    """Pack one row for each (prefix ids, branches). The last token of a prefix may predict a branch's first target.

    Raises :class:`ValueError` where a branch's mask has another length than its ids, or an empty prefix would have to
    predict.
    """
    rows = lay_out(sequences, pad=pad)
    return Packed(rows.ids, rows.positions, tree_mask(rows.segment), rows.index, rows.targets, rows.branch)


def tree_mask(segment: Tensor) -> Tensor:
    """bool [B, 1, T, T], on the device of ``segment`` ([B, T]): each branch sees the prefix and itself."""
    length = segment.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
    own = segment[:, None, :] == segment[:, :, None]
    mask = causal & (own | (segment[:, None, :] == 0)) & (segment >= 0)[:, None, :]
    mask |= torch.eye(length, dtype=torch.bool, device=segment.device)  # padding sees itself, or it would be nan
    return mask[:, None]


def lay_out(sequences: Sequence[tuple[Sequence[int], Sequence[Branch]]], *, pad: int = 0) -> Rows:
    """The rows of :func:`pack`; raises as it does."""
    length = max(len(prefix) + sum(len(ids) for ids, _ in branches) for prefix, branches in sequences)
    shape = (len(sequences), length)
    ids, positions = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
    segment = torch.full(shape, -1)  # -1 padding, 0 prefix, then the branches of the row
    index: list[tuple[int, int]] = []
    targets: list[int] = []
    number: list[int] = []
    count = 0
    for row, (prefix, branches) in enumerate(sequences):
        start = end = len(prefix)
        ids[row, :start] = torch.tensor(prefix)
        positions[row, :start] = torch.arange(start)
        segment[row, :start] = 0
        for i, (tokens, sampled) in enumerate(branches):
            if len(tokens) != len(sampled):
                raise ValueError(f"branch {i} of row {row} has {len(tokens)} ids and a mask of {len(sampled)}")
            if not start and sampled and sampled[0]:
                raise ValueError(f"branch {i} of row {row} begins with a target, and nothing stands before it")
            begin, end = end, end + len(tokens)
            ids[row, begin:end] = torch.tensor(tokens)
            positions[row, begin:end] = torch.arange(start, start + len(tokens))
            segment[row, begin:end] = i + 1
            for offset, wanted in enumerate(sampled):
                if wanted:
                    index.append((row, begin + offset - 1 if offset else start - 1))
                    targets.append(tokens[offset])
                    number.append(count)
            count += 1
    return Rows(
        ids,
        positions,
        segment,
        torch.tensor(index, dtype=torch.long).view(-1, 2),
        torch.tensor(targets, dtype=torch.long),
        torch.tensor(number, dtype=torch.long),
    )


def split(
    prefix: Sequence[int], branches: Sequence[Branch], *, max_branches: int = 8
) -> list[tuple[Sequence[int], Sequence[Branch]]]:
    """Rows for :func:`pack` with at most ``max_branches`` branches each, in the given order."""
    return [(prefix, branches[i : i + max_branches]) for i in range(0, len(branches), max_branches)]


def packed_logits(model: LlamaForCausalLM, packed: Packed) -> Tensor:
    """float32 [M, vocabulary]: the logits that predict ``packed.targets``, and only those."""
    hidden = model.model(
        input_ids=packed.ids, position_ids=packed.positions, attention_mask=packed.mask, use_cache=False
    ).last_hidden_state
    return model.lm_head(hidden[packed.index[:, 0], packed.index[:, 1]]).float()
