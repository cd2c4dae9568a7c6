"""The forward pass for sampling on a GPU: ragged rows, products in bfloat16, and decode steps as CUDA graphs.

A decode step of a small model is hundreds of short kernels, and starting them from Python takes longer than they run. A
CUDA graph starts them at once. A graph is recorded for each power of two of rows, over fixed inputs and the cache.

What a layer computes beside its matrix products is one kernel each. Sums and norms are computed in float32; results for
matrix products, attention and the cache have the type of these. Each row of the cache has its own length, and keys are
read up to their query's position, so a batch of short and long rows needs neither padding nor a mask in memory. One
kernel computes prefill (many queries a row) and decoding (one), with the online softmax of FlashAttention (Dao et al.
2022, arXiv:2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groundwire.train.policy.decoding.decoder import Decoder

_GATE_BLOCK = 1024
"""Results that one program of :func:`gate` computes."""


@dataclass
class _RecordedStep:
    """A recorded decode step with its fixed inputs and its output. The graph reads and writes their memory."""

    ids: Tensor
    positions: Tensor
    last: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    output: Tensor | None = None


class GPUDecoder(Decoder):
    """See :class:`groundwire.train.policy.decoding.decoder.Decoder`."""

    prefill_tokens = 32768
    prefix_cache_tokens = 131072

    def __init__(self, model: Any, *, max_positions: int, bf16: bool) -> None:
        self._steps: dict[int, _RecordedStep] = {}
        self._recorded: tuple[int, torch.Size] | None = None  # the cache that the steps were recorded for
        super().__init__(model, max_positions=max_positions, bf16=bf16)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Copy the model's present weights to the places where recorded steps read them."""
        *single, layers = self._read_weights()
        places = [self.embedding, self.output, self.norm, *(each for layer in self._weights for each in layer)]
        for place, new in zip(places, [*single, *(each for layer in layers for each in layer)], strict=True):
            place.copy_(new)

    def logits(
        self, ids: Tensor, positions: Tensor, last: Tensor, cache: Tensor, *, first_row: int, span: int
    ) -> Tensor:
        """See :meth:`groundwire.train.policy.decoding.decoder.Decoder.logits`; ``span`` does not matter."""
        if ids.is_cuda and ids.shape[1] == 1 and first_row == 0:
            return self._replay(ids, positions, cache)
        return self._forward(ids, positions, last, cache[:, :, first_row:])

    def _replay(self, ids: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """A decode step as one graph. Its further rows write to rows of the cache that are free."""
        if self._recorded != (cache.data_ptr(), cache.shape):
            self._steps.clear()
            self._recorded = cache.data_ptr(), cache.shape
        rows = len(ids)
        size = min(cache.shape[2], 1 << (rows - 1).bit_length())
        step = self._steps.get(size)
        if step is None:
            ids_of_step, positions_of_step = ids.new_zeros(2, size, 1)
            step = self._steps[size] = _RecordedStep(ids_of_step, positions_of_step, last=ids.new_zeros(size))
        step.ids[:rows], step.positions[:rows] = ids, positions
        step.positions[rows:].zero_()
        if step.graph is None:
            self._record(step, cache)
        step.graph.replay()  # type: ignore[union-attr]
        return step.output[:rows]  # type: ignore[index]

    def _record(self, step: _RecordedStep, cache: Tensor) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and libraries loaded before a recording
            self._forward(step.ids, step.positions, step.last, cache)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step.output = self._forward(step.ids, step.positions, step.last, cache)
        step.graph = graph  # not before: a recording can run out of memory, and is tried again

    def _forward(self, ids: Tensor, positions: Tensor, last: Tensor, cache: Tensor) -> Tensor:
        (batch, steps), eps = ids.shape, self.eps
        all_heads = self.heads + 2 * self.kv_heads
        x, change = self.embedding[ids.flatten()], None
        products = self.products or x.dtype

        def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.linear(x, weight, bias if bias.numel() else None)

        for weights, keys, values in zip(self._weights, cache[0], cache[1], strict=True):
            norm1, wqkv, bqkv, wo, bo, norm2, wgu, bgu, wd, bd, query_norm, key_norm = weights
            x, h = add_and_normalize(x, change, norm1, eps, products)
            qkv = linear(h, wqkv, bqkv).view(batch, steps, all_heads, self.head)
            norms = (query_norm, key_norm) if query_norm.numel() else None
            query = rotate_and_store(qkv, positions, self._cos, self._sin, norms, eps, keys, values)
            o = cached_attention(query, keys, values, positions)
            x, h = add_and_normalize(x, linear(o.view(batch * steps, -1), wo, bo), norm2, eps, products)
            change = linear(gate(linear(h, wgu, bgu)), wd, bd)
        last = torch.arange(batch, device=ids.device) * steps + last
        _, h = add_and_normalize(x[last], change[last], self.norm, eps, products)  # type: ignore[index]
        return F.linear(h, self.output)


def add_and_normalize(
    x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``x + change``, and its RMS norm with ``weight`` in ``dtype``; both ``[tokens, width]``, ``x`` is float32."""
    if not x.is_cuda:
        x = x if change is None else x + change
        return x, F.rms_norm(x, [x.shape[1]], weight, eps).to(dtype)
    from groundwire.train.policy.decoding import _triton

    tokens, width = x.shape
    total, normed = x if change is None else torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    _triton.add_and_normalize[(tokens,)](
        x, x if change is None else change, weight, total, normed, eps,
        WIDTH=width, BLOCK=_triton.next_power_of_2(width), ADD=change is not None,
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
        from groundwire.train.policy.decoding import _triton

        queries = qkv.new_empty(rows, steps, heads, width)
        _triton.rotate_and_store[(rows * steps, all_heads)](
            qkv, positions, cos, sin, *(norms or (cos, cos)), eps, queries, keys, values, steps, *keys.stride()[:3],
            HEADS=heads, KV_HEADS=kv_heads, HALF=width // 2, BLOCK=_triton.next_power_of_2(width // 2),
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
    from groundwire.train.policy.decoding import _triton

    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(tokens, width)
    _triton.gate[(tokens, _triton.cdiv(width, _GATE_BLOCK))](gate_up, result, WIDTH=width, BLOCK=_GATE_BLOCK)
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
    from groundwire.train.policy.decoding import _triton

    query = query.contiguous()
    rows, steps, heads, width = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    output = torch.empty_like(query)
    # 16 queries are the least that a matrix product takes.
    queries = min(64, max(16, _triton.next_power_of_2(steps * groups)))
    _triton.attend[(_triton.cdiv(steps * groups, queries), rows * kv_heads)](
        query, keys, values, positions, output, steps, *query.stride()[:3], *keys.stride()[:3], width**-0.5,
        KV_HEADS=kv_heads, GROUPS=groups, HEAD=width, WIDTH=max(16, _triton.next_power_of_2(width)),
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
