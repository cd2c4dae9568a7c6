"""The Triton kernel of :mod:`groundwire.train.policy.decoding.cached_attention`. It is imported on a GPU only."""

import triton
import triton.language as tl

__all__ = ["attend"]


@triton.jit
def attend(
    queries,
    keys,
    values,
    positions,
    outputs,
    steps,
    query_row,
    query_step,
    query_head,
    key_row,
    key_head,
    key_position,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program computes QUERIES queries of one row and one key head, with the online softmax of FlashAttention.

    The query heads that share the key head are further queries. Keys after a program's last position are not read.
    """
    row, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    step, head = query // GROUPS, kv_head * GROUPS + query % GROUPS
    real = query < steps * GROUPS
    position = tl.load(positions + row * steps + step, mask=real, other=0)
    width = tl.arange(0, WIDTH)
    inside = width < HEAD
    place = row.to(tl.int64) * query_row + step[:, None] * query_step + head[:, None] * query_head + width[None, :]
    q = tl.load(queries + place, mask=real[:, None] & inside[None, :], other=0.0)
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, WIDTH], tl.float32)
    first = row.to(tl.int64) * key_row + kv_head.to(tl.int64) * key_head
    end = tl.max(position, 0) + 1
    for start in range(0, end, KEYS):
        key = start + tl.arange(0, KEYS)
        at = first + key[:, None] * key_position + width[None, :]
        read = (key < end)[:, None] & inside[None, :]
        k = tl.load(keys + at, mask=read, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        score = tl.where(key[None, :] <= position[:, None], score, -float("inf"))
        highest_now = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - highest_now[:, None])
        faded = tl.exp2(highest - highest_now)
        v = tl.load(values + at, mask=read, other=0.0)
        mean = mean * faded[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * faded + tl.sum(weight, 1)
        highest = highest_now
    mean = mean / total[:, None]
    tl.store(outputs + place, mean.to(outputs.dtype.element_ty), mask=real[:, None] & inside[None, :])
