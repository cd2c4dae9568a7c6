"""Rows with common prefixes as one row that holds each prefix once: which tokens stay, and which rows go together.

Rows in the order of their prompts form a tree of any depth: each row continues a first part of the row before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PrefixTree(NamedTuple):
    """``T`` tokens of a micro-batch's rows, one row after the other, of which ``U`` are kept."""

    keep: Tensor
    """int64 [U]: the kept tokens, as indices of the T tokens"""
    expand: Tensor
    """int64 [T]: the kept token that each token is, as an index of the U tokens"""
    end: Tensor
    """int64 [U]: the index after the last kept token that attends to each, for ``tree_block_mask``"""


def prefix_tree(prompts: Sequence[Tensor], lengths: Sequence[int]) -> PrefixTree:
    """The tree of rows of ``lengths`` tokens, which begin with ``prompts`` (int64 [P] each, on a CPU).

    Any order of the rows is right; the order of :func:`micro_batches` keeps the fewest tokens. Everything after a
    prompt is kept, and so is the last token that a prompt shares: its label may be another one in each row.

    The rows ``p q r x`` and ``p q r s y`` with prompts ``p q r`` and ``p q r s`` share ``p q``::

        kept tokens   0 p   1 q   2 r   3 x   4 r   5 s   6 y
        expand        0 1 2 3  and  0 1 4 5 6
        end           7     7     4     4     7     7     7

    ``p`` and ``q`` are seen up to the end, the first row's ``r`` and ``x`` only up to 4, where the second row begins.
    """
    keep: list[Tensor] = []
    expand: list[Tensor] = []
    starts: list[tuple[int, int]] = []  # of each row: the tokens shared with the row before, and its first kept token
    first = kept = 0
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        shared = _shared(prompts[row - 1], prompt) if row else 0
        before = expand[-1][:shared] if row else torch.empty(0, dtype=torch.long)
        new = length - shared
        expand.append(torch.cat([before, torch.arange(kept, kept + new)]))
        keep.append(torch.arange(first + shared, first + length))
        starts.append((shared, kept))
        first, kept = first + length, kept + new
    # Backwards, since a token is seen by the rows after its own as long as they share its position: a row that shares
    # fewer tokens begins anew from there on, and ends what came before it at these positions.
    end = torch.empty(kept, dtype=torch.long)
    ends_at = torch.full((max(lengths),), kept)  # by position: the first kept token that does not descend from it
    for (shared, start), length in zip(reversed(starts), reversed(lengths), strict=True):
        end[start : start + length - shared] = ends_at[shared:length]
        ends_at[shared:] = start
    return PrefixTree(torch.cat(keep), torch.cat(expand), end)


def micro_batches(
    prompts: Sequence[Tensor], lengths: Sequence[int], most_tokens: int, least: int = 1
) -> list[list[int]]:
    """Rows that are computed together: at least ``least`` lists of indices, of at most ``most_tokens`` kept tokens.

    A longer row is alone. ``least`` may be as large as the number of rows.
    """
    batches: list[list[int]] = []
    tokens = 0
    # In the order of their prompts neighbours share most. Big-endian bytes are ordered as the numbers, and faster.
    ids = [prompt.numpy().astype(">i8").tobytes() for prompt in prompts]
    for row in sorted(range(len(ids)), key=ids.__getitem__):
        added = lengths[row] - (_shared(prompts[batches[-1][-1]], prompts[row]) if batches else 0)
        if not batches or tokens + added > most_tokens:
            batches.append([])
            tokens, added = 0, lengths[row]
        batches[-1].append(row)
        tokens += added
    while len(batches) < least:
        longest = max(range(len(batches)), key=lambda number: len(batches[number]))
        rows = batches[longest]
        batches[longest : longest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return batches


def _shared(before: Tensor, prompt: Tensor) -> int:
    """How many first tokens have the same id and the same next token."""
    length = min(len(before), len(prompt))
    different = torch.nonzero(before[:length] != prompt[:length])
    return max(0, (int(different[0]) if len(different) else length) - 1)
