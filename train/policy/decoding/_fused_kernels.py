"""The Triton kernels of :mod:`groundwire.train.policy.decoding.fused`. They are imported on a GPU only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_and_normalize", "gate", "rotate_and_store"]


def add_and_normalize(
    x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One program for each token."""
    tokens, width = x.shape
    total, normed = torch.empty_like(x) if change is not None else x, torch.empty_like(x, dtype=dtype)
    _add_and_normalize[(tokens,)](
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
    """One program for each token and head, of queries, keys and values."""
    rows, steps, all_heads, width = qkv.shape
    kv_heads = keys.shape[1]
    heads = all_heads - 2 * kv_heads
    queries = qkv.new_empty(rows, steps, heads, width)
    query_norm, key_norm = norms or (cos, cos)
    _rotate_and_store[(rows * steps, all_heads)](
        qkv, positions, cos, sin, query_norm, key_norm, eps, queries, keys, values, steps, *keys.stride()[:3],
        HEADS=heads, KV_HEADS=kv_heads, HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2),
        NORM=norms is not None,
    )  # fmt: skip
    return queries


def gate(gate_up: Tensor) -> Tensor:
    """One program for 1,024 results of a token."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(tokens, width)
    _gate[(tokens, triton.cdiv(width, 1024))](gate_up, result, WIDTH=width, BLOCK=1024)
    return result


@triton.jit
def _add_and_normalize(
    x, changes, weight, totals, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + at
    total = tl.load(x + place, mask=inside, other=0.0)
    if ADD:
        total += tl.load(changes + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(totals + place, total, mask=inside)
    scale = tl.rsqrt(tl.sum(total * total, 0) / WIDTH + eps)
    result = total * scale * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    positions,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    queries,
    keys,
    values,
    steps,
    key_row,
    key_head,
    key_position,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + at
    first, second = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
    position = tl.load(positions + token)
    stored = (token // steps) * key_row + position * key_position + at
    if head < HEADS + KV_HEADS:
        a, b = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
            norm = query_norm + at
            if head >= HEADS:
                norm = key_norm + at
            a = a * scale * tl.load(norm, mask=inside, other=0.0)
            b = b * scale * tl.load(norm + HALF, mask=inside, other=0.0)
        angle = position * 2 * HALF + at
        cos1, sin1 = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0)
        angle += HALF
        cos2, sin2 = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0)
        first, second = (a * cos1 - b * sin1).to(first.dtype), (b * cos2 + a * sin2).to(first.dtype)
        target = queries + (token * HEADS + head) * 2 * HALF + at
        if head >= HEADS:
            target = keys + stored + (head - HEADS) * key_head
    else:
        target = values + stored + (head - HEADS - KV_HEADS) * key_head
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)


@triton.jit
def _gate(gate_up, results, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    source = gate_up + token * 2 * WIDTH + at
    gates = tl.load(source, mask=inside, other=0.0)
    wide = gates.to(tl.float32)
    # Rounded before the product, as the trainer's update does it.
    opened = (wide * tl.sigmoid(wide)).to(gates.dtype).to(tl.float32)
    result = opened * tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(results + token * WIDTH + at, result.to(results.dtype.element_ty), mask=inside)
