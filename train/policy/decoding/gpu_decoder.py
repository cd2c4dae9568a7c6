"""The forward pass for sampling on a GPU: ragged rows, products in bfloat16, and decode steps as CUDA graphs.

A decode step of a small model is hundreds of short kernels, and starting them from Python takes longer than they run. A
CUDA graph starts them at once. A graph is recorded for each power of two of rows, over fixed inputs and the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groundwire.train.policy.decoding.decoder import Decoder
from groundwire.train.policy.decoding.kernels import add_and_normalize, cached_attention, gate, rotate_and_store


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
