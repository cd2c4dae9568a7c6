"""The forward pass for sampling on a GPU: ragged rows, products in bfloat16, and decode steps as CUDA graphs.

A decode step of a small model is hundreds of short kernels, and starting them from Python takes longer than they run. A
CUDA graph starts them at once. A graph is recorded for each power of two of rows, over fixed inputs and the cache.

What a layer computes beside its matrix products is one kernel each: they compute what the methods of the same names
of :class:`.Decoder` do. Sums and norms are computed in float32; results for matrix products, attention and the cache
have the type of these. Each row of the cache has its own length, and keys are read up to their query's position, so a
batch of short and long rows needs neither padding nor a mask in memory. One kernel computes prefill (many queries a
row) and decoding (one), with the online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from groundwire.train.policy.decoding.decoder import Decoder

with suppress(ImportError):  # the settings of the class are read without Triton, too
    from groundwire.train.policy.decoding import _triton

_GATE_BLOCK = 1024  # results that one program of :meth:`GPUDecoder.gate` computes


class _RecordedStep(NamedTuple):
    """A recorded decode step with its fixed inputs and its output. The graph reads and writes their memory."""

    ids: Tensor
    positions: Tensor
    last: Tensor
    graph: torch.cuda.CUDAGraph
    output: Tensor


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
        for places, weights in zip(self.weights, self._read_weights(), strict=True):
            for place, new in zip(places, weights, strict=True):
                place.copy_(new)

    def logits(
        self, ids: Tensor, positions: Tensor, last: Tensor, cache: Tensor, *, first_row: int, span: int
    ) -> Tensor:
        """See :meth:`groundwire.train.policy.decoding.decoder.Decoder.logits`; ``span`` does not matter."""
        if ids.shape[1] == 1 and first_row == 0:
            return self._replay(ids, positions, cache)
        return super().logits(ids, positions, last, cache, first_row=first_row, span=span)

    def _replay(self, ids: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """A decode step as one graph. Its further rows write to rows of the cache that are free."""
        if self._recorded != (cache.data_ptr(), cache.shape):
            self._steps.clear()
            self._recorded = cache.data_ptr(), cache.shape
        rows = len(ids)
        size = min(cache.shape[2], 1 << (rows - 1).bit_length())
        if size not in self._steps:
            more_rows = (0, 0, 0, size - rows)
            self._steps[size] = self._record(F.pad(ids, more_rows), F.pad(positions, more_rows), cache)
        step = self._steps[size]
        step.ids[:rows], step.positions[:rows] = ids, positions
        step.positions[rows:].zero_()
        step.graph.replay()
        return step.output[:rows]

    def _record(self, ids: Tensor, positions: Tensor, cache: Tensor) -> _RecordedStep:
        last = ids.new_zeros(len(ids))
        compute = partial(Decoder.logits, self, ids, positions, last, cache, first_row=0, span=0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and libraries loaded before a recording
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = compute()
        return _RecordedStep(ids, positions, last, graph, output)

    @staticmethod
    def visible(positions: Tensor, _span: int, _groups: int, _dtype: torch.dtype) -> Tensor:
        """What :meth:`attend` needs to know: the positions."""
        return positions

    @staticmethod
    def add_and_normalize(
        x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """``x`` and its sums are float32."""
        tokens, width = x.shape
        total, normed = x if change is None else torch.empty_like(x), torch.empty_like(x, dtype=dtype)
        _triton.add_and_normalize[(tokens,)](
            x, x if change is None else change, weight, total, normed, eps,
            WIDTH=width, BLOCK=_triton.next_power_of_2(width), ADD=change is not None,
        )  # fmt: skip
        return total, normed

    @staticmethod
    def rotate_and_store(
        qkv: Tensor, positions: Tensor, rotary: Tensor, norms: Tensor, eps: float, cache: Tensor
    ) -> Tensor:
        """The queries are contiguous."""
        rows, steps, all_heads, width = qkv.shape
        kv_heads = cache.shape[2]
        heads = all_heads - 2 * kv_heads
        queries = qkv.new_empty(rows, steps, heads, width)
        has_norms = norms.numel() > 0
        _triton.rotate_and_store[(rows * steps, all_heads)](
            qkv, positions, *rotary, *(norms if has_norms else rotary), eps, queries, *cache, steps,
            *cache.stride()[1:4], HEADS=heads, KV_HEADS=kv_heads, HALF=width // 2,
            BLOCK=_triton.next_power_of_2(width // 2), NORM=has_norms,
        )  # fmt: skip
        return queries

    @staticmethod
    def gate(gate_up: Tensor) -> Tensor:
        """In one kernel."""
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        result = gate_up.new_empty(tokens, width)
        _triton.gate[(tokens, _triton.cdiv(width, _GATE_BLOCK))](gate_up, result, WIDTH=width, BLOCK=_GATE_BLOCK)
        return result

    @staticmethod
    def attend(query: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
        """``query`` is contiguous, and so are ``positions`` [rows, steps]."""
        rows, steps, heads, width = query.shape
        kv_heads = cache.shape[2]
        groups = heads // kv_heads
        output = torch.empty_like(query)
        # 16 queries are the least that a matrix product takes.
        queries = min(64, max(16, _triton.next_power_of_2(steps * groups)))
        _triton.attend[(_triton.cdiv(steps * groups, queries), rows * kv_heads)](
            query, *cache, positions, output, steps, *query.stride()[:3], *cache.stride()[1:4], width**-0.5,
            KV_HEADS=kv_heads, GROUPS=groups, HEAD=width, WIDTH=max(16, _triton.next_power_of_2(width)),
            QUERIES=queries, KEYS=64 if query.element_size() == 2 else 32,
        )  # fmt: skip
        return output
