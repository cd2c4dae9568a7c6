"""Attention over many sequences in one row, without padding, with torch's own kernels for GPUs.

Importing this module makes two ``attn_implementation`` of transformers:

- :data:`VARLEN`: a sequence begins wherever the position is 0, as in the packed rows of verl (``use_remove_padding``),
  so no other argument is needed. flash-attn does the same; torch has the kernel since 2.10
  (``torch.nn.attention.varlen``). With a :func:`tree_block_mask` it is the next one.
- :data:`TREE`: continuations of shared prefixes, whose mask is a :func:`tree_block_mask`; blocks that the mask excludes
  cost nothing (Dong et al. 2024, "FlexAttention", arXiv:2412.05496). With another mask, or none, as transformers' own.

Both compute what a layer asks for: a window of positions (``sliding_window``), a soft cap of the scores (``softcap``:
c * tanh(score / c), Gemma 2), and a learned score without a value for each head (``s_aux``: attention sinks, gpt-oss).
Neither has dropout. :func:`packs` says of which models these are all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

VARLEN = "groundwire_varlen"
TREE = "groundwire_tree"
_BLOCK = 128
_VARLEN_WIDTH = 256  # the widest head that the kernel for sequences without padding computes

_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "lm_head_bias")
"""Names in configurations for what a model does to its logits."""
_BIASED_HEADS = ("gptj", "phi")
_OLD = Version(transformers.__version__) < Version("5.24")  # tried were 5.10.4 and 5.24
MISCOMPUTED = frozenset({"glm_moe_dsa", "nemotron_h", "zamba2"} if _OLD else ())
"""Types whose log-probabilities this transformers computes wrong: in its Mamba 2 a token sees later ones."""


def packs(config: Any) -> bool:
    """Whether a model with this configuration of transformers computes rows of several sequences by these attentions.

    Its layers attend to all positions or to a window, and transformers says that they take a block mask and pass
    positions on. A recurrent state (Mamba, linear attention), a convolution or a chunk of columns would go on from one
    sequence into the next, and what a model with images needs is not in a block mask. Such a model gets rows of one
    sequence with padding at the end, which no earlier token sees, and :func:`padded_attention`.
    """
    model = _model_class(config)
    if model is None or config.get_text_config() is not config:
        return False
    known = set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
    # Gemma 4 divides the mask for shared layers; an old Ministral 3 does not pass positions on.
    known &= not (getattr(config, "num_kv_shared_layers", 0) or (_OLD and config.model_type == "ministral3"))
    supports = ("_supports_attention_backend", "_supports_flash_attn", "_supports_flex_attn")
    return known and not model._is_stateful and all(getattr(model, name) for name in supports)


def padded_attention(config: Any) -> str:
    """The ``attn_implementation`` for rows of one sequence with padding: transformers' own, unless a model packs."""
    if packs(config):
        return TREE
    return "sdpa" if getattr(_model_class(config), "_supports_sdpa", True) else "eager"


def has_plain_head(config: Any) -> bool:
    """Whether a model's logits are its last hidden states times a matrix.

    verl's fused kernels compute nothing else, and find it as ``lm_head`` beside ``model``.
    """
    model = _model_class(config)
    values = [getattr(config, name, None) for name in _LOGIT_CHANGES]
    changed = any(value is True or value not in (None, False, 1) for value in values)
    named = model is not None and model.base_model_prefix == "model"
    return named and not changed and config.model_type not in _BIASED_HEADS


def set_attention(model: Any) -> bool:
    """Give a model :func:`padded_attention`; returns whether it is :data:`TREE`, so that a row may hold a tree."""
    model.set_attn_implementation(padded_attention(model.config))
    return packs(model.config)


def _model_class(config: Any) -> Any:
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return known.get(type(config), None)


def _varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    *,
    position_ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row, or by a block mask.

    ``query`` is [1, heads, T, width], ``key`` and ``value`` [1, key heads, T, width], ``position_ids`` int64 [1, T].
    Returns [1, T, heads, width].

    Raises:
        ValueError: without a block mask: more than one row, or an attention mask, which only padding needs.
    """
    if isinstance(attention_mask, BlockMask):
        return _tree(module, query, key, value, attention_mask, **options)
    if query.shape[0] != 1 or attention_mask is not None:
        got = f"{query.shape[0]} rows{'' if attention_mask is None else ' and a mask'}"
        raise ValueError(f"{VARLEN} attends within one row without padding, and got {got}")
    if position_ids is None or position_ids.shape != (1, query.shape[2]):
        raise ValueError(
            f"{VARLEN} needs the position of each token, and {type(module).__name__} does not pass them on"
        )
    if not packs(module.config):
        raise ValueError(
            f"{VARLEN} would mix the sequences of a row in a model of type {module.config.model_type}: use padded rows "
            f"(use_remove_padding=False) and attn_implementation={padded_attention(module.config)}"
        )
    ends, longest, mask = _sequences(position_ids)
    more = any(options.get(name) is not None for name in ("softcap", "s_aux"))
    if more or not query.is_cuda or not query.shape[3] == value.shape[3] <= _VARLEN_WIDTH:
        return _tree(module, query, key, value, mask(), **options)
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    # The kernel computes in half precision only. torch 2.10's has no grouped heads, so keys and values are repeated.
    dtype = query.dtype if query.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    q, k, v = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    before = (_window(module, options) or 0) - 1  # keys before the query's own; -1 are all
    scale = options.get("scaling")
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=(before, 0))
    assert isinstance(out, Tensor)
    return out[None].to(query.dtype), None


def _window(module: Any, options: dict[str, Any]) -> int | None:
    """The number of positions that the layer attends to, its own included; None or 0 for all."""
    if "sliding_window" in options:
        return options["sliding_window"]
    config = getattr(module, "config", None)  # some models (Qwen2-MoE, Phi-3.5-MoE) say it in their masks alone
    kinds = getattr(config, "layer_types", None)
    local = kinds is None or kinds[module.layer_idx] == "sliding_attention"
    return getattr(config, "sliding_window", None) if local else None


def _sequences(position_ids: Tensor) -> tuple[Tensor, int, Callable[[], BlockMask]]:
    """The sequences' ends with a leading 0, int32 [N + 1]; the longest length; a function that makes their block mask.

    All layers share one computation.
    """
    known: Any = getattr(position_ids, "_groundwire_sequences", None)
    if known is None:
        starts = torch.nonzero(position_ids[0] == 0).reshape(-1).to(torch.int32)
        ends = torch.cat([starts, starts.new_tensor([position_ids.shape[1]])])
        lengths = ends.diff()

        @cache
        def mask() -> BlockMask:
            return tree_block_mask(ends[1:].long().repeat_interleave(lengths)[None], position_ids)

        known = position_ids._groundwire_sequences = ends, int(lengths.max()), mask
    return known


def tree_block_mask(end: Tensor, positions: Tensor, window: int | None = None) -> BlockMask:
    """The mask of a row that holds a tree: each token attends to itself and to the tokens on the path to the root.

    ``end`` is int64 [B, T]: the column after the last token that attends to each token, so a key's queries are one
    range of columns. ``positions`` are the tokens' in their sequences, int64 [B, T]. A ``window`` leaves each query the
    keys at so many positions up to its own. A model's layers get the mask without one, and take those of their windows
    from it. Blocks are counted from the ranges' ends; a dense mask of 65,536 tokens would take 4.3 GB.
    """
    rows, length = end.shape
    blocks = -(-length // _BLOCK)
    column = torch.arange(length, device=end.device).expand(rows, -1)
    row_of_counts = column // _BLOCK * (blocks + 1)

    def keys(first: Tensor, stop: Tensor) -> Tensor:
        """[B, query blocks, key blocks]: the keys in a key block whose range of query blocks has this query block."""
        counts = end.new_zeros(rows, blocks * (blocks + 1))
        counts.scatter_add_(1, row_of_counts + first, torch.ones_like(end))
        counts.scatter_add_(1, row_of_counts + torch.maximum(stop, first), -torch.ones_like(end))
        return counts.view(rows, blocks, blocks + 1).cumsum(-1)[..., :-1].transpose(1, 2).contiguous()

    def on_path(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < end[row, key])

    full = keys(-(-column // _BLOCK), end // _BLOCK) == _BLOCK
    partial = (keys(column // _BLOCK, (end - 1) // _BLOCK + 1) > 0) & ~full
    attends: Any = on_path
    if window is not None:
        until = positions + window  # a tensor: the compiled kernel serves all windows

        def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return on_path(row, head, query, key) & (positions[row, query] < until[row, key])

        padded = F.pad(positions.float()[:, None], (0, -length % _BLOCK), mode="replicate")[:, 0].view(rows, blocks, -1)
        first, last = padded.amin(-1), padded.amax(-1)
        within = full & (last[:, :, None] - first[:, None] < window)
        partial = (partial | full) & ~within & (first[:, :, None] - last[:, None] < window)
        full = within
    ordered: list[Tensor] = []
    for chosen in (partial, full):
        number, order = chosen.sum(-1), chosen.int().argsort(dim=-1, descending=True, stable=True)
        ordered += [number[:, None].int(), order[:, None].int()]
    mask: Any = BlockMask.from_kv_blocks(*ordered, BLOCK_SIZE=_BLOCK, mask_mod=attends, seq_lengths=(length, length))
    row, query = torch.arange(rows, device=end.device)[:, None, None, None], column[0][:, None]
    mask.dense = cache(lambda: attends(row, row, query, column[0]))
    mask.of_window = cache(lambda window: tree_block_mask(end, positions, window))
    return mask


def _tree(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention by a block mask, or a mask of transformers; shapes as in :func:`_varlen`, with any number of rows."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # in autocast their rotation is computed in float32
    blocks = isinstance(attention_mask, BlockMask)
    mask: Any = attention_mask
    if blocks and (window := _window(module, options)):
        mask = mask.of_window(window)
    if blocks and query.is_cuda:
        options = {
            "score_mod": _soft_cap(softcap, query.device) if softcap else None,
            "scale": scaling,
            "enable_gqa": True,
            # For less than 128 queries torch takes a kernel for decoding, which groups of heads can be too large for.
            "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True},
        }
        if s_aux is not None:
            options["return_aux"] = AuxRequest(lse=True)
        out = _compiled_flex()(query, key, value, block_mask=mask, **options)
        if s_aux is not None:  # the softmax's sum has one term more: exp(lse) becomes exp(lse) + exp(sink)
            out, aux = out
            out = (out * torch.sigmoid(aux.lse - s_aux[:, None].float())[..., None]).to(value.dtype)
        return out.transpose(1, 2), None
    mask = mask.dense() if blocks else mask  # torch has no backward pass of FlexAttention for CPUs
    if not softcap and s_aux is None:
        causal = mask is None and query.shape[2] > 1
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, is_causal=causal, enable_gqa=True)
    else:
        out = _with_scores(query, key, value, mask, scaling, softcap, s_aux)
    return out.transpose(1, 2), None


def _with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """[B, heads, queries, width], from all scores; ``mask`` is bool, True where a query attends to a key."""
    rows, heads, queries, width = query.shape
    k, v = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    scores = (query @ k.transpose(2, 3)).float() * (width**-0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(queries, k.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril() if queries > 1 else mask
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # padding may have no key
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.float()[:, None, None].expand(rows, heads, queries, 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


@cache
def _soft_cap(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    cap = torch.tensor(softcap, device=device)  # with dynamic shapes the compiler takes no number here
    return lambda score, _row, _head, _query, _key: cap * torch.tanh(score / cap)


@cache
def _compiled_flex() -> Callable[..., Any]:
    # Every row has another length, and a compilation takes 15 s: one with dynamic shapes serves all.
    return torch.compile(flex_attention, dynamic=True)


AttentionInterface.register(TREE, _tree)
AttentionInterface.register(VARLEN, _varlen)
AttentionMaskInterface.register(TREE, sdpa_mask)
AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)  # positions say what a mask would
