"""Attention over many sequences in one row, without padding, with torch's own kernels for GPUs.

Importing this module makes two ``attn_implementation`` of transformers:

- :data:`VARLEN`: a sequence begins wherever the position is 0, as in the packed rows of verl (``use_remove_padding``),
  so no other argument is needed. flash-attn does the same; torch has the kernel since 2.10
  (``torch.nn.attention.varlen``). With a :func:`tree_block_mask` it is the next one.
- :data:`TREE`: continuations of shared prefixes, whose mask is a :func:`tree_block_mask`; blocks that the mask excludes
  cost nothing (Dong et al. 2024, "FlexAttention", arXiv:2412.05496).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

VARLEN = "groundwire_varlen"
TREE = "groundwire_tree"
_BLOCK = 128


def _varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    *,
    position_ids: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row, or by a block mask.

    ``query`` is [1, heads, T, width], ``key`` and ``value`` [1, key heads, T, width], ``position_ids`` int64 [1, T].
    Returns [1, T, heads, width].

    Raises:
        ValueError: without a block mask: more than one row, or an attention mask, which only padding needs.
    """
    if isinstance(attention_mask, BlockMask):
        return _tree(module, query, key, value, attention_mask, scaling=scaling)
    if query.shape[0] != 1 or attention_mask is not None:
        got = f"{query.shape[0]} rows{'' if attention_mask is None else ' and a mask'}"
        raise ValueError(f"{VARLEN} attends within one row without padding, and got {got}")
    ends, longest = _sequences(position_ids)
    if not query.is_cuda:  # torch has no such kernel for a CPU: one sequence at a time
        parts = []
        for start, end in pairwise(ends.tolist()):
            q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
        return torch.cat(parts, 2).transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    # The kernel computes in half precision only. torch 2.10's has no grouped heads, so keys and values are repeated.
    dtype = query.dtype if query.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    q, k, v = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out[None].to(query.dtype), None


def _sequences(position_ids: Tensor) -> tuple[Tensor, int]:
    """The sequences' ends with a leading 0, int32 [N + 1], and the longest length. All layers share one computation."""
    known = getattr(position_ids, "_groundwire_sequences", None)
    if known is None:
        positions = position_ids.reshape(-1)
        starts = torch.nonzero(positions == 0).reshape(-1).to(torch.int32)
        ends = torch.cat([starts, starts.new_tensor([len(positions)])])
        known = position_ids._groundwire_sequences = ends, int(ends.diff().max())
    ends, longest = known
    return ends, longest


def tree_block_mask(end: Tensor) -> BlockMask:
    """The mask of a row that holds a tree: each token attends to itself and to the tokens on the path to the root.

    ``end`` is int64 [B, T]: the column after the last token that attends to each token, so a key's queries are one
    range of columns. Blocks are counted from the ranges' ends; a dense mask of 65,536 tokens would take 4.3 GB.
    """

    def attends(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < end[row, key])

    rows, length = end.shape
    blocks = -(-length // _BLOCK)
    column = torch.arange(length, device=end.device).expand(rows, -1)
    row_of_counts = column // _BLOCK * (blocks + 1)

    def keys(first: Tensor, stop: Tensor) -> Tensor:
        """[B, query blocks, key blocks]: the keys in a key block whose range of query blocks has this query block."""
        counts = end.new_zeros(rows, blocks * (blocks + 1))
        counts.scatter_add_(1, row_of_counts + first, torch.ones_like(end))
        counts.scatter_add_(1, row_of_counts + torch.maximum(stop, first), -torch.ones_like(end))
        return counts.view(rows, blocks, blocks + 1).cumsum(-1)[..., :-1].transpose(1, 2).contiguous()

    full = keys(-(-column // _BLOCK), end // _BLOCK) == _BLOCK
    partial = (keys(column // _BLOCK, (end - 1) // _BLOCK + 1) > 0) & ~full
    ordered: list[Tensor] = []
    for chosen in (partial, full):
        number, order = chosen.sum(-1), chosen.int().argsort(dim=-1, descending=True, stable=True)
        ordered += [number[:, None].int(), order[:, None].int()]
    return BlockMask.from_kv_blocks(*ordered, BLOCK_SIZE=_BLOCK, mask_mod=attends, seq_lengths=(length, length))


def _tree(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention by a block mask; shapes as in :func:`_varlen`, with any number of rows."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # in autocast their rotation is computed in float32
    if query.is_cuda:
        out = _compiled_flex()(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True)
    else:  # torch has no backward pass of it for CPUs
        rows, _heads, length, _width = query.shape
        mask = create_mask(attention_mask.mask_mod, rows, None, length, length, device=str(query.device))
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    # Every row has another length, and a compilation takes 15 s: one with dynamic shapes serves all.
    return torch.compile(flex_attention, dynamic=True)


AttentionInterface.register(TREE, _tree)
AttentionInterface.register(VARLEN, _varlen)
AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)  # positions say what a mask would
