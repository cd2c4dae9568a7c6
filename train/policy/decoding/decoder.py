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


def _logits(
    ids: Tensor,
    positions: Tensor,
    last: Tensor,
    first_row: int,
    keys: Tensor,
    values: Tensor,
    embedding: Tensor,
    layers: list[list[Tensor]],
    norm: Tensor,
    output: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    span: int,
    eps: float,
) -> Tensor:
    batch, steps = ids.shape
    kv_heads, head = keys.shape[2], keys.shape[4]
    groups = heads // kv_heads
    x = embedding[ids]
    width = x.shape[-1]
    c, s = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)
    rows = torch.arange(first_row, first_row + batch, device=ids.device).unsqueeze(1)
    # A float mask: the CPU kernel would convert a boolean one in every layer.
    seen = torch.arange(span, device=ids.device) <= positions.unsqueeze(-1)
    mask = torch.zeros(seen.shape, dtype=keys.dtype, device=x.device).masked_fill_(~seen, -float("inf")).unsqueeze(1)
    if groups > 1:
        mask = mask.repeat(1, 1, groups, 1)
    for i, w in enumerate(layers):
        norm1, wqkv, bqkv, wo, bo, norm2, wgu, bgu, wd, bd, qn, kn = w
        h = F.linear(F.rms_norm(x, [width], norm1, eps).to(wqkv.dtype), wqkv, bqkv if bqkv.numel() > 0 else None)
        h = h.view(batch, steps, heads + 2 * kv_heads, head)
        qk, v = h[:, :, : heads + kv_heads].to(x.dtype), h[:, :, heads + kv_heads :]
        if qn.numel() > 0:
            qk = torch.cat(
                [F.rms_norm(qk[:, :, :heads], [head], qn, eps), F.rms_norm(qk[:, :, heads:], [head], kn, eps)], 2
            )
        half = head // 2
        qk = (qk * c + torch.cat([-qk[..., half:], qk[..., :half]], -1) * s).to(keys.dtype)
        k_cache, v_cache = keys[i].transpose(1, 2), values[i].transpose(1, 2)
        k_cache.index_put_((rows, positions), qk[:, :, heads:])
        v_cache.index_put_((rows, positions), v)
        # Query heads that share a key head become further queries, so keys and values are not repeated in memory.
        q = qk[:, :, :heads].view(batch, steps, kv_heads, groups, head).permute(0, 2, 3, 1, 4)
        q = q.reshape(batch, kv_heads, groups * steps, head)
        k = keys[i, first_row : first_row + batch, :, :span]
        o = F.scaled_dot_product_attention(q, k, values[i, first_row : first_row + batch, :, :span], attn_mask=mask)
        o = o.view(batch, kv_heads, groups, steps, head).permute(0, 3, 1, 2, 4).reshape(batch, steps, heads * head)
        x = x + F.linear(o, wo, bo if bo.numel() > 0 else None)
        gate_up = F.linear(F.rms_norm(x, [width], norm2, eps).to(wgu.dtype), wgu, bgu if bgu.numel() > 0 else None)
        gate, up = gate_up.chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, wd, bd if bd.numel() > 0 else None)
    x = x[torch.arange(batch, device=x.device), last]
    return F.linear(F.rms_norm(x, [width], norm, eps).to(output.dtype), output)


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
    _scripted_logits = torch.jit.script(_logits)
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
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = float(config.rms_norm_eps)
        Decoder.refresh(self)
        # The model's own rotary module knows the scaling of its positions.
        positions = torch.arange(self.max_positions, device=self.device)[None]
        cos, sin = self._model.model.rotary_emb(self.embedding[:1], positions)
        self._cos, self._sin = (each[0].to(self.embedding.dtype).contiguous() for each in (cos, sin))

    @property
    def device(self) -> torch.device:
        """The weights' device."""
        return self.embedding.device

    def refresh(self) -> None:
        """Copy the model's present weights."""
        self.embedding, self.output, self.norm, self._weights = self._read_weights()

    @torch.inference_mode()
    def _read_weights(self) -> tuple[Tensor, Tensor, Tensor, list[list[Tensor]]]:
        """Copies of embedding, output layer, last norm, and each layer's weights; those of products in their dtype."""
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

        layers = []
        for layer in body.layers:
            a, m = layer.self_attn, layer.mlp
            norms = [getattr(a, n).weight.detach().clone() if hasattr(a, n) else none for n in ("q_norm", "k_norm")]
            layers.append(
                [
                    layer.input_layernorm.weight.detach().clone(),
                    *fused(a.q_proj, a.k_proj, a.v_proj),
                    *fused(a.o_proj),
                    layer.post_attention_layernorm.weight.detach().clone(),
                    *fused(m.gate_proj, m.up_proj),
                    *fused(m.down_proj),
                    *norms,
                ]
            )
        return embedding, output, body.norm.weight.detach().clone(), layers

    def cache(self, rows: int, length: int) -> Tensor:
        """A cache for ``rows`` sequences: zeros [2 (keys, values), layers, rows, key heads, length, head width]."""
        shape = (2, self.layers, rows, self.kv_heads, length, self.head)
        return torch.zeros(shape, device=self.device, dtype=self.products or self.embedding.dtype)

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
        return _scripted_logits(
            ids, positions, last, first_row, cache[0], cache[1], self.embedding, self._weights, self.norm,
            self.output, self._cos, self._sin, self.heads, span, self.eps,
        )  # fmt: skip


def make_decoder(model: Any, *, max_positions: int, bf16: bool) -> Decoder:
    """The decoder for the model's device. The GPU's needs Triton; without it the CPU's runs on the GPU."""
    if model.device.type == "cuda" and find_spec("triton"):
        from groundwire.train.policy.decoding.gpu_decoder import GPUDecoder

        return GPUDecoder(model, max_positions=max_positions, bf16=bf16)
    return Decoder(model, max_positions=max_positions, bf16=bf16)


def check_supported(model: Any) -> None:
    """Raise :class:`UnsupportedModelError` unless :class:`Decoder` computes the model's architecture."""
    if problem := _unsupported(model.config):
        raise unsupported(type(model).__name__, problem)


def _unsupported(config: Any) -> str | None:
    if config.model_type not in SUPPORTED:
        return f"its model_type is {config.model_type!r}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its hidden_act is {config.hidden_act!r}, not 'silu'"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some of its layers use sliding-window attention"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        return f"its rope_type is {rope!r}, which depends on the length of the sequence"
    return None
