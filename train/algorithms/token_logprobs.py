"""The log-probability of each sampled token and the entropy of its distribution, in bounded memory.

A vocabulary is a hundred times a hidden state's width, so the logits are the largest tensor of a forward pass. They are
computed for some tokens at a time. If there are several such chunks, the backward pass computes each chunk again
instead of keeping it (activation checkpointing; Chen et al. 2016, arXiv:1604.06174).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from groundwire.train.policy.constraint import unpack_masks


class Head:
    """What a causal LM computes after its last hidden states: [M, width] to [M, vocabulary], with a gradient.

    That is more than the output layer: Granite divides the logits, Gemma 2 caps them. So it is the model's own code, in
    a copy with the same weights whose body returns what it is given.
    """

    def __init__(self, model: Any) -> None:
        self.out_features = len(model.get_output_embeddings().weight)
        self._model = copy.copy(model)
        self._model._modules = {**model._modules, model.base_model_prefix: _Given()}

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits of ``hidden``."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


class _Given(torch.nn.Module):
    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class _Output(BaseModelOutput):
    def __getattr__(self, name: str) -> None:  # what a model passes on beside its logits
        if name.startswith("__"):
            raise AttributeError(name)


def token_logprobs(
    head: Any,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    masks: Tensor | None = None,
    logits_per_chunk: int = 1 << 26,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of ``targets`` (int64 [M]) and the entropies (nats), both float32 [M].

    ``head`` is a :class:`Head` or another function with ``out_features``; ``hidden`` is [M, width]. ``temperature``
    divides the logits. ``masks``, uint8 [M, bytes] on any device, are the tokens with a probability, for
    :func:`.unpack_masks`. At most ``logits_per_chunk`` logits exist at once, but those of one token. The entropies can
    be differentiated only with ``entropy_gradient``; otherwise they cost one pass over the logits.
    """

    def chunk(hidden: Tensor, targets: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float()
        if temperature != 1:
            logits = logits / temperature
        if masks is not None:
            logits = logits.masked_fill(~unpack_masks(masks.to(logits.device), head.out_features), -torch.inf)
        logprobs = torch.log_softmax(logits, -1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            # 0 times infinity is not a number.
            finite = logprobs if masks is None else logprobs.clamp(min=-1e4)
            entropy = -(logprobs.exp() * finite).sum(-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropy

    size = max(1, logits_per_chunk // head.out_features)
    if len(hidden) <= size:
        return chunk(hidden, targets, masks)
    chunks = [
        checkpoint(chunk, *tensors, use_reentrant=False)
        for tensors in zip(
            hidden.split(size),
            targets.split(size),
            [None] * len(hidden) if masks is None else masks.split(size),
            strict=False,
        )
    ]
    logprobs, entropy = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)
