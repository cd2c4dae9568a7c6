"""What a decoder layer computes beside its matrix products, each as one kernel on a GPU.

A decode step of a small model is limited by the number of its kernels, not by their work. Sums and norms are computed
in float32; results for matrix products, attention and the cache have the type of these.

Each row of the cache has its own length. Keys are read up to their query's position and no further, so a batch of short
and long rows needs neither padding nor a mask in memory. One kernel computes prefill (many queries a row) and decoding
(one), with the online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GATE_BLOCK = 1024
"""Results that one program of :func:`gate` computes."""


def add_and_normalize(
    x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``x + change``, and its RMS norm with ``weight`` in ``dtype``; both ``[tokens, width]``, ``x`` is float32."""
    if not x.is_cuda:
        x = x if change is None else x + change
        return x, F.rms_norm(x, [x.shape[1]], weight, eps).to(dtype)
    import triton

    from groundwire.train.policy.decoding import _triton

    tokens, width = x.shape
    total, normed = x if change is None else torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    _triton.add_and_normalize[(tokens,)](
        x, x if change is None else change, weight, total, normed, eps,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), ADD=change is not None,
    )  # fmt: skip
    return total, normed


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Rotate queries and keys to their positions, and write keys and values into the cache.

    Args:
        qkv: queries, keys and values after each other, ``[rows, steps, heads + 2 key heads, width]``, contiguous.
        positions: int64 ``[rows, steps]``, contiguous.
        cos: float32 ``[all positions, width]``; ``sin`` likewise.
        norms: the weights ``[width]`` of the RMS norms of queries and of keys (Qwen 3), with ``eps``.
        keys: a layer's cache, ``[rows or more, key heads, length, width]``, contiguous in its last dimension.
        values: as ``keys``, with the same strides.

    Returns:
        The queries ``[rows, steps, heads, width]``, contiguous.
    """
    rows, steps, all_heads, width = qkv.shape
    kv_heads = keys.shape[1]
    heads = all_heads - 2 * kv_heads
    if qkv.is_cuda:
        import triton

        from groundwire.train.policy.decoding import _triton

        queries = qkv.new_empty(rows, steps, heads, width)
        _triton.rotate_and_store[(rows * steps, all_heads)](
            qkv, positions, cos, sin, *(norms or (cos, cos)), eps, queries, keys, values, steps, *keys.stride()[:3],
            HEADS=heads, KV_HEADS=kv_heads, HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2),
            NORM=norms is not None,
        )  # fmt: skip
        return queries
    qk, v = qkv[:, :, :-kv_heads].to(cos.dtype), qkv[:, :, -kv_heads:]
    if norms is not None:
        q, k = qk.split([heads, kv_heads], 2)
        qk = torch.cat([F.rms_norm(each, [width], norm, eps) for each, norm in zip((q, k), norms, strict=True)], 2)
    turned = torch.cat([-qk[..., width // 2 :], qk[..., : width // 2]], -1)
    qk = (qk * cos[positions].unsqueeze(2) + turned * sin[positions].unsqueeze(2)).to(qkv.dtype)
    row = torch.arange(rows, device=qkv.device)[:, None]
    keys.transpose(1, 2)[row, positions] = qk[:, :, heads:]
    values.transpose(1, 2)[row, positions] = v
    return qk[:, :, :heads].contiguous()


def gate(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of ``[tokens, 2 width]``, times the second half."""
    if not gate_up.is_cuda:
        first, second = gate_up.chunk(2, -1)
        return F.silu(first) * second
    import triton

    from groundwire.train.policy.decoding import _triton

    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(tokens, width)
    _triton.gate[(tokens, triton.cdiv(width, _GATE_BLOCK))](gate_up, result, WIDTH=width, BLOCK=_GATE_BLOCK)
    return result


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

    from groundwire.train.policy.decoding._triton import attend

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
