"""The log-probability of each sampled token and the entropy of its distribution, in bounded memory.

A vocabulary is a hundred times a hidden state's width, so the logits are the largest tensor of a forward pass. They are
computed for some tokens at a time. If there are several such chunks, the backward pass computes each chunk again
instead of keeping it (activation checkpointing; Chen et al. 2016, arXiv:1604.06174).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    head: Any,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    forbidden: Tensor | None = None,
    logits_per_chunk: int = 1 << 26,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of ``targets`` and the entropies (nats), both float32 [M].

    Args:
        head: the output layer, a module with ``out_features``.
        hidden: [M, width].
        targets: int64 [M].
        temperature: divides the logits.
        forbidden: bool [M, vocabulary] on any device; tokens without a probability.
        logits_per_chunk: most logits that exist at once, but at least one token's.
        entropy_gradient: whether the entropies are differentiable. Otherwise they cost one pass over the logits.
    """

    def chunk(hidden: Tensor, targets: Tensor, forbidden: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float()
        if temperature != 1:
            logits = logits / temperature
        if forbidden is not None:
            logits = logits.masked_fill(forbidden.to(logits.device), -torch.inf)
        logprobs = torch.log_softmax(logits, -1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = _entropy(logprobs, masked=forbidden is not None)
        return logprobs.gather(1, targets[:, None])[:, 0], entropy

    size = max(1, logits_per_chunk // head.out_features)
    if len(hidden) <= size:
        return chunk(hidden, targets, forbidden)
    parts = [
        checkpoint(chunk, *part, use_reentrant=False)
        for part in zip(
            hidden.split(size),
            targets.split(size),
            [None] * len(hidden) if forbidden is None else forbidden.split(size),
            strict=False,
        )
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _entropy(logprobs: Tensor, *, masked: bool) -> Tensor:
    """[M] for log-probabilities [M, vocabulary]. ``masked``: some are -inf, and 0 times infinity is not a number."""
    finite = logprobs.clamp(min=-1e4) if masked else logprobs
    return -(logprobs.exp() * finite).sum(-1)
