"""Attention of new tokens to a cache of keys and values, in which each row has its own length.

A row's keys are read up to its query's position and no further, so a batch of short and long rows needs neither padding
nor a mask in memory. One kernel computes prefill (many queries a row) and decoding (one), with the online softmax of
FlashAttention (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cached_attention"]


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """The attention of each query to the keys of its row at positions up to its own.

    Args:
        query: ``[rows, steps, heads, width]``.
        keys: ``[rows or more, key heads, length, width]``, contiguous in its last dimension.
        values: as ``keys``, with the same strides.
        positions: int64 ``[rows, steps]``, contiguous, each below ``length``.

    Returns:
        ``[rows, steps, heads, width]``, contiguous, in the queries' dtype.
    """
    if not query.is_cuda:
        return _masked(query, keys, values, positions)
    import triton

    from groundwire.train.policy.decoding._cached_attention_kernel import attend

    query = query.contiguous()
    rows, steps, heads, width = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    output = torch.empty_like(query)
    # 16 queries are the least that a matrix product takes.
    queries = min(64, max(16, triton.next_power_of_2(steps * groups)))
    attend[(triton.cdiv(steps * groups, queries), rows * kv_heads)](
        query, keys, values, positions, output, steps, *query.stride()[:3], *keys.stride()[:3], width**-0.5,
        KV_HEADS=kv_heads, GROUPS=groups, HEAD=width, WIDTH=max(16, triton.next_power_of_2(width)),
        QUERIES=queries, KEYS=64 if query.element_size() == 2 else 32,
    )  # fmt: skip
    return output


def _masked(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """The same with a mask, for a CPU: it shows what the kernel computes, and serves tests."""
    rows, length = len(query), keys.shape[2]
    seen = torch.arange(length, device=query.device) <= positions[:, None, :, None]
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys[:rows], values[:rows], attn_mask=seen, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous()
