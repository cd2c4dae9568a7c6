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
    """The log-probabilities of ``targets`` (int64 [M]) and the entropies (nats), both float32 [M].

    ``head`` is the output layer, a module with ``out_features``; ``hidden`` is [M, width]. ``temperature`` divides the
    logits. ``forbidden``, bool [M, vocabulary] on any device, are tokens without a probability. At most
    ``logits_per_chunk`` logits exist at once, but those of one token. The entropies can be differentiated only with
    ``entropy_gradient``; otherwise they cost one pass over the logits.
    """

    def chunk(hidden: Tensor, targets: Tensor, forbidden: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float()
        if temperature != 1:
            logits = logits / temperature
        if forbidden is not None:
            logits = logits.masked_fill(forbidden.to(logits.device), -torch.inf)
        logprobs = torch.log_softmax(logits, -1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            # 0 times infinity is not a number.
            finite = logprobs if forbidden is None else logprobs.clamp(min=-1e4)
            entropy = -(logprobs.exp() * finite).sum(-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropy

    size = max(1, logits_per_chunk // head.out_features)
    if len(hidden) <= size:
        return chunk(hidden, targets, forbidden)
    chunks = [
        checkpoint(chunk, *tensors, use_reentrant=False)
        for tensors in zip(
            hidden.split(size),
            targets.split(size),
            [None] * len(hidden) if forbidden is None else forbidden.split(size),
            strict=False,
        )
    ]
    logprobs, entropy = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)
