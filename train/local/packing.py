"""Prefix-shared packing: many short continuations of one long prompt in one row.

The schema is most of a prompt, and every question about a database, every turn of a rollout and every rollout of a
group begins with it. A row holds this prefix once. Each branch after it attends to the prefix and to itself (a tree
mask), and its positions continue from the prefix. The logits equal those of separate passes, for a third of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

__all__ = ["Branch", "Packed", "pack", "packed_logits", "to_device"]

Branch = tuple[Sequence[int], Sequence[int]]
"""Token ids, and a mask of the same length: 1 for a sampled token (a target), 0 for context."""


class Packed(NamedTuple):
    """``B`` rows of ``T`` ids, and the ``M`` targets in them, in the order of the branches."""

    ids: Tensor
    """int64 [B, T]"""
    positions: Tensor
    """int64 [B, T]; every branch restarts after the prefix"""
    mask: Tensor
    """bool [B, 1, T, T]; True where the query (third axis) attends to the key (last axis)"""
    index: Tensor
    """int64 [M, 2]: row and column of the position that predicts each target"""
    targets: Tensor
    """int64 [M]"""


def pack(sequences: Sequence[tuple[Sequence[int], Sequence[Branch]]]) -> Packed:
    """Pack one row for each (prefix ids, branches). The last token of a prefix predicts a branch's first token.

    Raises:
        ValueError: a branch's mask and ids differ in length, or a branch after an empty prefix begins with a target.
    """
    length = max(len(prefix) + sum(len(ids) for ids, _ in branches) for prefix, branches in sequences)
    shape = (len(sequences), length)
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    segment = torch.full(shape, -1)  # -1 is padding, 0 the prefix, 1 and above the branches
    index: list[tuple[int, int]] = []
    targets: list[int] = []
    for row, (prefix, branches) in enumerate(sequences):
        start = end = len(prefix)
        ids[row, :start] = torch.tensor(prefix)
        positions[row, :start] = torch.arange(start)
        segment[row, :start] = 0
        for i, (tokens, sampled) in enumerate(branches):
            if len(tokens) != len(sampled):
                raise ValueError(f"branch {i} of row {row} has {len(tokens)} ids and a mask of {len(sampled)}")
            if not start and sampled and sampled[0]:
                raise ValueError(f"branch {i} of row {row} begins with a target, and no token precedes it")
            begin, end = end, end + len(tokens)
            ids[row, begin:end] = torch.tensor(tokens)
            positions[row, begin:end] = torch.arange(start, start + len(tokens))
            segment[row, begin:end] = i + 1
            for offset, is_target in enumerate(sampled):
                if is_target:
                    index.append((row, begin + offset - 1 if offset else start - 1))
                    targets.append(tokens[offset])
    index_tensor = torch.tensor(index, dtype=torch.long).view(-1, 2)
    return Packed(ids, positions, _tree_mask(segment), index_tensor, torch.tensor(targets, dtype=torch.long))


def to_device(packed: Packed, device: Any) -> Packed:
    """``packed`` with its tensors on ``device``."""
    return Packed(*(tensor.to(device) for tensor in packed))


def _tree_mask(segment: Tensor) -> Tensor:
    """bool [B, 1, T, T] for segment numbers [B, T]: each branch attends to the prefix and to itself."""
    length = segment.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    own = segment[:, None, :] == segment[:, :, None]
    mask = causal & (own | (segment[:, None, :] == 0)) & (segment >= 0)[:, None, :]
    mask |= torch.eye(length, dtype=torch.bool)  # padding attends to itself: a softmax over nothing is NaN
    return mask[:, None]


def packed_logits(model: LlamaForCausalLM, packed: Packed) -> Tensor:
    """float32 [M, vocabulary]: the logits that predict ``packed.targets``."""
    hidden = model.model(
        input_ids=packed.ids, position_ids=packed.positions, attention_mask=packed.mask, use_cache=False
    ).last_hidden_state
    return model.lm_head(hidden[packed.index[:, 0], packed.index[:, 1]]).float()
