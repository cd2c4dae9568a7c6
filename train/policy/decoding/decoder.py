"""A decoder's forward pass for sampling: one TorchScript call over a cache that all rows share.

A decode step of a tiny model is about a hundred small operations, and eager torch acquires the interpreter lock after
each of them. If an event loop runs agents in the same process, each acquisition can take a switch interval, 5 ms by
default, and a step of 16 ms takes more than a second. A scripted function releases the lock once, for the whole step.

Prefill and decoding are the same function: a query attends to all positions up to its own, so a row may start anywhere
(after a cached prefix, or at its next token), and keys of padding are overwritten before any query attends to them.
"""

# No ``from __future__ import annotations`` here: TorchScript reads the signatures.
import warnings
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groundwire.train.policy.errors import UnsupportedModelError
from groundwire.train.policy.pretrained.model_settings import SUPPORTED, unsupported


def visible(positions: Tensor, span: int, groups: int, dtype: torch.dtype) -> Tensor:
    """What :func:`attend` needs to know of ``positions``: 0 for a key that a query attends to, else minus infinity.

    A float mask: the CPU kernel would convert a boolean one in every layer.
    """
    hidden = torch.arange(span, device=positions.device) > positions.unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -float("inf"))
    return mask.unsqueeze(1) if groups == 1 else mask.unsqueeze(1).repeat(1, 1, groups, 1)


def add_and_normalize(
    x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``x + change``, and its RMS norm with ``weight`` in ``dtype``; both ``[tokens, width]``."""
    if change is not None:
        x = x + change
    return x, F.rms_norm(x, [x.shape[1]], weight, eps).to(dtype)


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


def attend(query: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
    """The attention of each query to the keys of its row at positions up to its own, in the queries' dtype.

    ``query`` and the result are ``[rows, steps, heads, width]``, ``mask`` is from :func:`visible`.
    """
    rows, steps, heads, width = query.shape
    kv_heads, span = cache.shape[2], mask.shape[3]
    # Query heads that share a key head become further queries, so keys and values are not repeated in memory.
    q = query.view(rows, steps, kv_heads, -1, width).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, width)
    o = F.scaled_dot_product_attention(q, cache[0, :rows, :, :span], cache[1, :rows, :, :span], attn_mask=mask)
    return o.view(rows, kv_heads, -1, steps, width).permute(0, 3, 1, 2, 4).reshape(rows, steps, heads, width)


def gate(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of ``[tokens, 2 width]``, times the second half."""
    first, second = gate_up.chunk(2, -1)
    return F.silu(first) * second


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias if bias.numel() > 0 else None)


def make_forward(visible: Any, add_and_normalize: Any, rotate_and_store: Any, attend: Any, gate: Any) -> Any:
    """The forward pass. The functions compute what a layer has beside its matrix products."""

    def forward(
        ids: Tensor, positions: Tensor, last: Tensor, span: int, cache: Tensor, weights: list[list[Tensor]], eps: float
    ) -> Tensor:
        (batch, steps), (_, _, _, kv_heads, _, head) = ids.shape, cache.shape
        embedding, norm, output, rotary = weights[0]
        heads = weights[1][1].shape[0] // head  # of queries, keys and values
        seen = visible(positions, span, heads // kv_heads - 2, cache.dtype)
        x = embedding[ids.flatten()]
        change: Tensor | None = None
        for i, layer in enumerate(weights[1:]):
            norm1, wqkv, bqkv, wo, bo, norm2, wgu, bgu, wd, bd, norms = layer
            x, h = add_and_normalize(x, change, norm1, eps, wqkv.dtype)
            qkv = _linear(h, wqkv, bqkv).view(batch, steps, heads, head)
            query = rotate_and_store(qkv, positions, rotary, norms, eps, cache[:, i])
            o = attend(query, cache[:, i], seen).reshape(batch * steps, -1)
            x, h = add_and_normalize(x, _linear(o, wo, bo), norm2, eps, wgu.dtype)
            change = _linear(gate(_linear(h, wgu, bgu)), wd, bd)
        assert change is not None
        last = torch.arange(batch, device=ids.device) * steps + last
        return F.linear(add_and_normalize(x[last], change[last], norm, eps, output.dtype)[1], output)

    return forward


def _choose(
    logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor, any_top_p: bool
) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature).unsqueeze(1), -1)
    weight = logprobs.exp()
    if any_top_p:
        # The smallest set of the likeliest tokens with a mass of at least top_p; the likeliest one always stays.
        ordered, order = weight.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1, dtype=torch.float64) - ordered >= top_p.unsqueeze(1), 0.0)
        weight = torch.zeros_like(weight).scatter_(1, order, ordered)
    # Inverse transform sampling with one uniform number per row: a row's token does not depend on the other rows.
    # In float64, because a float32 sum over a large vocabulary would lose the smallest weights.
    mass = weight.cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(mass, (uniform * mass[:, -1]).unsqueeze(1), right=True).squeeze(1)
    token = torch.where(greedy, logits.argmax(-1), drawn.clamp(max=logits.shape[1] - 1))
    return token, logprobs.gather(1, token.unsqueeze(1)).squeeze(1)


with warnings.catch_warnings():
    # TorchScript is deprecated, but nothing else runs a whole step without the lock and without a C++ compiler.
    warnings.simplefilter("ignore")
    _scripted_forward = torch.jit.script(make_forward(visible, add_and_normalize, rotate_and_store, attend, gate))
    _scripted_choose = torch.jit.script(_choose)


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor, *, any_top_p: bool
) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits: ``[rows, vocabulary]``.
        temperature: float32 ``[rows]``; 0 selects the likeliest token.
        top_p: float64 ``[rows]``, above 0 and up to 1.
        uniform: float64 ``[rows]`` in ``[0, 1)``; a row's token is a function of its logits and this number.
        any_top_p: whether any row's ``top_p`` is below 1; otherwise the vocabulary is not sorted.

    Returns:
        The tokens, int64 ``[rows]``, and their log-probabilities, float32 ``[rows]``:
        ``log_softmax(logits / temperature)`` before ``top_p`` (with temperature 0: at temperature 1).
    """
    # On a GPU TorchScript compiles kernels again for other shapes.
    choose = _choose if logits.is_cuda else _scripted_choose
    return choose(logits, temperature, top_p, uniform, any_top_p)


class Decoder:
    """A copy of a Hugging Face decoder's weights, fused for sampling, and its forward pass over a shared cache.

    With a copy, an optimizer may change the model during sampling; :meth:`refresh` copies the new weights. Raises
    :class:`UnsupportedModelError`.

    ``bf16``: matrix products, attention and the cache in bfloat16. As in the trainer's update, the residual stream,
    norms and rotations are in the type of the weights, so sampler and trainer agree as far as rounding allows.
    """

    prefill_tokens = 4096
    """Most tokens, padding included, of one prefill call: it bounds the memory when many requests arrive at once."""
    prefix_cache_tokens = 32768
    """Tokens of earlier prompts that are worth keeping."""
    _forward = staticmethod(_scripted_forward)

    def __init__(self, model: Any, *, max_positions: int, bf16: bool) -> None:
        check_supported(model)
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
        return self._forward(ids, positions, last, span, cache[:, :, first_row:], self.weights, self.eps)


def make_decoder(model: Any, *, max_positions: int, bf16: bool) -> Decoder:
    """The decoder for the model's device. The GPU's needs Triton; without it the CPU's runs on the GPU."""
    if model.device.type == "cuda" and find_spec("triton"):
        from groundwire.train.policy.decoding.gpu_decoder import GPUDecoder

        return GPUDecoder(model, max_positions=max_positions, bf16=bf16)
    return Decoder(model, max_positions=max_positions, bf16=bf16)


def check_supported(model: Any) -> None:
    """Raise :class:`UnsupportedModelError` unless :class:`Decoder` computes the model's architecture."""
    config, problem = model.config, ""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in SUPPORTED:
        problem = f"its model_type is {config.model_type!r}"
    elif getattr(config, "hidden_act", "silu") != "silu":
        problem = f"its hidden_act is {config.hidden_act!r}, not 'silu'"
    elif any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        problem = "some of its layers use sliding-window attention"
    elif rope in ("dynamic", "longrope"):
        problem = f"its rope_type is {rope!r}, which depends on the length of the sequence"
    if problem:
        raise unsupported(type(model).__name__, problem)
