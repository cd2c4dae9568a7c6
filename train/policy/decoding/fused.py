"""What a decoder layer does between its matrix products and its attention, each as one kernel on a GPU.

A decode step of a small model is limited by the number of its kernels, not by their work. Sums and norms are computed
in float32; results for matrix products, attention and the cache have the type of these.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["add_and_normalize", "gate", "rotate_and_store"]


def add_and_normalize(
    x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``x + change``, and its RMS norm with ``weight`` in ``dtype``; both ``[tokens, width]``, ``x`` is float32."""
    if not x.is_cuda:
        x = x if change is None else x + change
        return x, F.rms_norm(x, [x.shape[1]], weight, eps).to(dtype)
    from groundwire.train.policy.decoding import _fused_kernels

    return _fused_kernels.add_and_normalize(x, change, weight, eps, dtype)


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
    if qkv.is_cuda:
        from groundwire.train.policy.decoding import _fused_kernels

        return _fused_kernels.rotate_and_store(qkv, positions, cos, sin, norms, eps, keys, values)
    rows, _, all_heads, width = qkv.shape
    kv_heads = keys.shape[1]
    heads = all_heads - 2 * kv_heads
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
    if gate_up.is_cuda:
        from groundwire.train.policy.decoding import _fused_kernels

        return _fused_kernels.gate(gate_up)
    first, second = gate_up.chunk(2, -1)
    return F.silu(first) * second
