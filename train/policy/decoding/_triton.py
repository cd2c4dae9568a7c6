"""The Triton kernels of :mod:`groundwire.train.policy.decoding.gpu_decoder`. Without Triton they are not imported."""

import triton
import triton.language as tl
from triton import cdiv, next_power_of_2  # noqa: F401  what the grids and blocks are counted with


@triton.jit
def attend(
    queries, keys, values, positions, outputs, steps,
    query_row, query_step, query_head, key_row, key_head, key_position, scale,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def add_and_normalize(
    x, changes, weight, totals, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """One program for each token. With ``ADD`` the sum is stored, too."""
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
def rotate_and_store(
    qkv, positions, cos, sin, query_norm, key_norm, eps, queries, keys, values, steps,
    key_row, key_head, key_position,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program for each token and head, of queries, keys and values."""
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
def gate(gate_up, results, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program for ``BLOCK`` results of a token."""
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
