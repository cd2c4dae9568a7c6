"""Attention over sequences that lie one after another in one row, without padding: torch's own variable-length kernel.

Importing this module makes :data:`VARLEN` an ``attn_implementation`` of transformers. A sequence begins wherever the
position is 0, as in the packed rows of verl (``use_remove_padding``), so no other argument is needed. flash-attn does
the same; torch has had the kernel since 2.10 (``torch.nn.attention.varlen``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

__all__ = ["VARLEN"]

VARLEN = "groundwire_varlen"
"""The name for ``attn_implementation``."""


def _varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row.

    ``query`` is [1, heads, T, width], ``key`` and ``value`` [1, key heads, T, width], ``position_ids`` int64 [1, T].
    Returns [1, T, heads, width].

    Raises:
        ValueError: more than one row, or an attention mask, which only padding needs.
    """
    if query.shape[0] != 1 or attention_mask is not None:
        raise ValueError(
            f"{VARLEN} attends within one row without padding, and got {query.shape[0]} rows"
            + (" and a mask" if attention_mask is not None else "")
        )
    ends, longest = _sequences(position_ids)
    if not query.is_cuda:
        return _one_by_one(query, key, value, ends.tolist(), scaling), None
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


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, ends: list[int], scaling: float | None) -> Tensor:
    """The same on a CPU, for which torch has no such kernel."""
    parts = []
    for start, end in pairwise(ends):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(parts, 2).transpose(1, 2)


AttentionInterface.register(VARLEN, _varlen)
AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)  # positions say what a mask would
