"""What all batches of the sampling engine share: the requests that are decoded together, and how a token is sampled."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from groundwire.train.policy.constraint import Constraint, Constraints
from groundwire.train.policy.errors import EngineError
from groundwire.train.policy.types import Completion, OnToken, Sampling

Prompt = tuple[int, ...]


@dataclass(eq=False, kw_only=True)
class OpenReply(Completion):
    """A reply that is being sampled; the future's result is this object."""

    sampling: Sampling
    max_tokens: int
    random: random.Random
    on_token: OnToken | None = None
    constraint: Constraint | None = None
    arrived: float = field(default_factory=time.perf_counter)
    future: Future[Completion] = field(default_factory=Future)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


class Batch(ABC):
    """Requests, whose number is its length; only the engine's thread uses it."""

    def __init__(self, tokenizer: Any, constraints: Constraints) -> None:
        self.requests: list[OpenReply] = []
        self._tokenizer, self._constraints = tokenizer, constraints

    def __len__(self) -> int:
        return len(self.requests)

    @abstractmethod
    def refresh_weights(self) -> None:
        """Copy the model's present weights. The batch must be empty."""

    @abstractmethod
    def add(self, arrived: list[OpenReply]) -> None:
        """Read the prompts into the cache, each different one once, and sample each request's first token.

        If this fails, none of ``arrived`` is in the batch.
        """

    @abstractmethod
    def decode(self) -> None:
        """Sample one more token for every request."""

    @abstractmethod
    def _keep(self, stay: list[int]) -> None:
        """Drop all requests but those with these numbers, which rise."""

    def remove_finished(self) -> list[OpenReply]:
        """Take finished, failed and cancelled requests out of the batch; returns the finished ones."""
        requests = self.requests
        stay = [i for i, request in enumerate(requests) if not request.finish_reason and not request.future.done()]
        if len(stay) == len(requests):
            return []
        finished = [request for request in requests if request.finish_reason]
        self._keep(stay)
        return finished

    @staticmethod
    def _by_prompt(arrived: list[OpenReply]) -> dict[Prompt, list[OpenReply]]:
        by_prompt: dict[Prompt, list[OpenReply]] = {}
        for request in arrived:
            by_prompt.setdefault(request.prompt_ids, []).append(request)
        return by_prompt

    def _sample(self, requests: list[OpenReply], logits: torch.Tensor) -> None:
        """Append a token, sampled from ``logits`` [requests, vocabulary], to each request."""
        if logits.device.type not in ("cpu", "cuda"):  # others have no float64
            logits = logits.cpu()
        device = logits.device
        constrained = [row for row, request in enumerate(requests) if request.constraint]
        if constrained:
            allowed = self._constraints.allowed([requests[row].constraint for row in constrained])  # type: ignore[misc]
            logits[constrained] = logits[constrained].masked_fill(~allowed.to(device), -torch.inf)
        top_p = [request.sampling.top_p for request in requests]
        tokens, logprobs = sample_tokens(
            logits,
            torch.tensor([request.sampling.temperature for request in requests], device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            torch.tensor([request.random.random() for request in requests], dtype=torch.float64, device=device),
            any_top_p=min(top_p) < 1,
        )
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if request.constraint:
                try:
                    request.constraint.consume(token)
                except EngineError as error:
                    with suppress(InvalidStateError):  # cancelled meanwhile
                        request.future.set_exception(error)
                    continue
            text = self._text_of_stopped(request, token)
            if text is not None:
                request.finish_reason, request.text = "stop", text
            elif len(request.token_ids) >= request.max_tokens:
                request.finish_reason, request.text = "length", self._decode(request.token_ids)
            if request.on_token is not None:
                request.on_token(token, logprob)

    def _text_of_stopped(self, request: OpenReply, token: int) -> str | None:
        """The text of a reply that ends with ``token``, without what ended it; None if the reply goes on."""
        sampling = request.sampling
        if token in self._constraints.end_tokens:
            return self._decode(request.token_ids)
        if token in sampling.stop_token_ids:
            return self._decode(request.token_ids[:-1])
        if sampling.stop:
            text = self._decode(request.token_ids)
            if places := [place for place in map(text.find, sampling.stop) if place >= 0]:
                return text[: min(places)]
        return None

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


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
