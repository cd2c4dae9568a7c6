"""A decoder's forward pass for sampling: few operations over a cache that all rows share.

A decode step of a tiny model is about a hundred small operations, and torch acquires the interpreter lock after each of
them. If an event loop runs agents in the same process, each acquisition can take a switch interval, 5 ms by default,
and a step of 16 ms would take more than a second: the engine makes the interval short.

Prefill and decoding are the same function: a query attends to all positions up to its own, so a row may start anywhere
(after a cached prefix, or at its next token), and keys of padding are overwritten before any query attends to them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groundwire.train.policy.errors import UnsupportedModelError

FAMILIES = ("llama", "qwen2", "qwen3")
"""The values of a config's ``model_type`` that :class:`Decoder` computes, with full attention."""


class Decoder:
    """A copy of a Hugging Face decoder's weights, fused for sampling, and its forward pass over a shared cache.

    With a copy, an optimizer may change the model during sampling; :meth:`refresh` copies the new weights. Raises
    :class:`UnsupportedModelError` for a damaged configuration.

    ``bf16``: matrix products, attention and the cache in bfloat16. As in the trainer's update, the residual stream,
    norms and rotations are in the type of the weights, so sampler and trainer agree as far as rounding allows.
    """

    prefill_tokens = 4096
    """Most tokens, padding included, of one prefill call: it bounds the memory when many requests arrive at once."""
    prefix_cache_tokens = 32768
    """Tokens of earlier prompts that are worth keeping."""

    def __init__(self, model: Any, *, max_positions: int, bf16: bool) -> None:
        self.products = torch.bfloat16 if bf16 else None
        """The type of matrix products and of the cache; None is that of the model's weights."""
        self._model, self.max_positions = model, max_positions
        try:
            self._read(model.config)
        except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UnsupportedModelError(f"the embedded engine cannot sample from this model: {reason}") from error

    def _read(self, config: Any) -> None:
        self.layers = config.num_hidden_layers
        heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.head = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.eps = float(config.rms_norm_eps)
        # The model's own rotary module knows the scaling of its positions.
        embedding = self._model.model.embed_tokens.weight.detach()
        positions = torch.arange(self.max_positions, device=embedding.device)[None]
        self._rotary = torch.cat(self._model.model.rotary_emb(embedding[:1], positions)).to(embedding.dtype)
        self.weights = self._read_weights()

    @property
    def device(self) -> torch.device:
        """The weights' device."""
        return self._rotary.device

    def refresh(self) -> None:
        """Copy the model's present weights."""
        self.weights = self._read_weights()

    @torch.inference_mode()
    def _read_weights(self) -> list[list[Tensor]]:
        """Copies of the weights, as the forward pass reads them; those of products in their dtype."""
        body, head = self._model.model, self._model.lm_head
        embedding = body.embed_tokens.weight.detach().clone()
        products = self.products or embedding.dtype
        tied = head.weight.data_ptr() == body.embed_tokens.weight.data_ptr()
        output = embedding if tied and products == embedding.dtype else head.weight.detach().clone().to(products)
        none = torch.empty(0, device=embedding.device, dtype=embedding.dtype)

        def fused(*modules: Any) -> list[Tensor]:
            biases = [m.bias.detach() for m in modules if m.bias is not None]
            weight = torch.cat([m.weight.detach() for m in modules])
            return [weight.to(products), torch.cat(biases).to(products) if biases else none]

        weights = [[embedding, body.norm.weight.detach().clone(), output, self._rotary]]
        for layer in body.layers:
            a, m = layer.self_attn, layer.mlp
            weights.append(
                [
                    layer.input_layernorm.weight.detach().clone(),
                    *fused(a.q_proj, a.k_proj, a.v_proj),
                    *fused(a.o_proj),
                    layer.post_attention_layernorm.weight.detach().clone(),
                    *fused(m.gate_proj, m.up_proj),
                    *fused(m.down_proj),
                    torch.stack([a.q_norm.weight.detach(), a.k_norm.weight.detach()]) if hasattr(a, "q_norm") else none,
                ]
            )
        return weights

    def cache(self, rows: int, length: int) -> Tensor:
        """A cache for ``rows`` sequences: zeros [2 (keys, values), layers, rows, key heads, length, head width]."""
        shape = (2, self.layers, rows, self.kv_heads, length, self.head)
        return torch.zeros(shape, device=self.device, dtype=self.products or self._rotary.dtype)

    def logits(
        self, ids: Tensor, positions: Tensor, last: Tensor, cache: Tensor, *, first_row: int, span: int
    ) -> Tensor:
        """Write the tokens' keys and values into the cache, and predict the next token of each row.

        Args:
            ids: int64 ``[rows, steps]``, right-padded with any token.
            positions: int64 ``[rows, steps]``, each below ``span``; the cache already holds the earlier ones.
            last: int64 ``[rows]``, the step of each row to predict from.
            cache: from :meth:`cache`, from its row ``first_row`` on.
            span: the number of positions to attend to, from the first.

        Returns ``[rows, vocabulary]``, in the products' type.
        """
        (batch, steps), cache = ids.shape, cache[:, :, first_row:]
        embedding, norm, output, rotary = self.weights[0]
        heads = self.weights[1][1].shape[0] // self.head  # of queries, keys and values
        seen = self.visible(positions, span, heads // self.kv_heads - 2, cache.dtype)
        x = embedding[ids.flatten()]
        change: Tensor | None = None
        for i, layer in enumerate(self.weights[1:]):
            norm1, wqkv, bqkv, wo, bo, norm2, wgu, bgu, wd, bd, norms = layer
            x, h = self.add_and_normalize(x, change, norm1, self.eps, wqkv.dtype)
            qkv = _linear(h, wqkv, bqkv).view(batch, steps, heads, self.head)
            query = self.rotate_and_store(qkv, positions, rotary, norms, self.eps, cache[:, i])
            o = self.attend(query, cache[:, i], seen).reshape(batch * steps, -1)
            x, h = self.add_and_normalize(x, _linear(o, wo, bo), norm2, self.eps, wgu.dtype)
            change = _linear(self.gate(_linear(h, wgu, bgu)), wd, bd)
        assert change is not None
        last = torch.arange(batch, device=ids.device) * steps + last
        return F.linear(self.add_and_normalize(x[last], change[last], norm, self.eps, output.dtype)[1], output)

    # What a layer computes beside its matrix products.

    @staticmethod
    def visible(positions: Tensor, span: int, groups: int, dtype: torch.dtype) -> Tensor:
        """What :meth:`attend` needs to know of ``positions``: 0 for a key that a query attends to, else minus infinity.

        A float mask: the CPU kernel would convert a boolean one in every layer.
        """
        hidden = torch.arange(span, device=positions.device) > positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -float("inf"))
        return mask.unsqueeze(1) if groups == 1 else mask.unsqueeze(1).repeat(1, 1, groups, 1)

    @staticmethod
    def add_and_normalize(
        x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """``x + change``, and its RMS norm with ``weight`` in ``dtype``; both ``[tokens, width]``."""
        if change is not None:
            x = x + change
        return x, F.rms_norm(x, [x.shape[1]], weight, eps).to(dtype)

    @staticmethod
    def rotate_and_store(
        qkv: Tensor, positions: Tensor, rotary: Tensor, norms: Tensor, eps: float, cache: Tensor
    ) -> Tensor:
        """Rotate queries and keys to their positions, write keys and values into the cache, and return the queries.

        Args:
            qkv: queries, keys and values after each other, ``[rows, steps, heads + 2 key heads, width]``, contiguous.
            positions: int64 ``[rows, steps]``, contiguous.
            rotary: cosines and sines, float32 ``[2, all positions, width]``.
            norms: the weights ``[2, width]`` of the RMS norms of queries and of keys (Qwen 3), with ``eps``, or empty.
            cache: a layer's keys and values, ``[2, rows or more, key heads, length, width]``.
        """
        rows, width, kv_heads = qkv.shape[0], qkv.shape[3], cache.shape[2]
        qk, v = qkv[:, :, :-kv_heads].to(rotary.dtype), qkv[:, :, -kv_heads:]
        if norms.numel() > 0:
            q, k = qk[:, :, :-kv_heads], qk[:, :, -kv_heads:]
            qk = torch.cat([F.rms_norm(q, [width], norms[0], eps), F.rms_norm(k, [width], norms[1], eps)], 2)
        turned = torch.cat([-qk[..., width // 2 :], qk[..., : width // 2]], -1)
        qk = (qk * rotary[0][positions].unsqueeze(2) + turned * rotary[1][positions].unsqueeze(2)).to(cache.dtype)
        place = (torch.arange(rows, device=qkv.device).unsqueeze(1), positions)
        cache[0].transpose(1, 2).index_put_(place, qk[:, :, -kv_heads:])
        cache[1].transpose(1, 2).index_put_(place, v)
        return qk[:, :, :-kv_heads]

    @staticmethod
    def attend(query: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
        """The attention of each query to the keys of its row at positions up to its own, in the queries' dtype.

        ``query`` and the result are ``[rows, steps, heads, width]``, ``mask`` is from :meth:`visible`.
        """
        rows, steps, heads, width = query.shape
        kv_heads, span = cache.shape[2], mask.shape[3]
        # Query heads that share a key head become further queries, so keys and values are not repeated in memory.
        q = query.view(rows, steps, kv_heads, -1, width).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, width)
        o = F.scaled_dot_product_attention(q, cache[0, :rows, :, :span], cache[1, :rows, :, :span], attn_mask=mask)
        return o.view(rows, kv_heads, -1, steps, width).permute(0, 3, 1, 2, 4).reshape(rows, steps, heads, width)

    @staticmethod
    def gate(gate_up: Tensor) -> Tensor:
        """SiLU of the first half of ``[tokens, 2 width]``, times the second half."""
        first, second = gate_up.chunk(2, -1)
        return F.silu(first) * second


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias if bias.numel() > 0 else None)


def make_decoder(model: Any, *, max_positions: int, bf16: bool) -> Decoder:
    """The decoder for the model's device. The GPU's needs Triton; without it the CPU's runs on the GPU."""
    if model.device.type == "cuda" and find_spec("triton"):
        from groundwire.train.policy.decoding.gpu_decoder import GPUDecoder

        return GPUDecoder(model, max_positions=max_positions, bf16=bf16)
    return Decoder(model, max_positions=max_positions, bf16=bf16)


def computes(config: Any) -> bool:
    """Whether :class:`Decoder` computes a model with this configuration of transformers."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        config.model_type in FAMILIES
        and getattr(config, "hidden_act", "silu") == "silu"
        and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
        and rope not in ("dynamic", "longrope")  # they depend on the length of the sequence
    )
