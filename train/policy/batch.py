"""The requests that the sampling engine decodes together, and how a token of each is sampled.

:class:`Batch` is what all batches share, :class:`DecoderBatch` that of our own decoder: its cache row ``i`` belongs to
request ``i``. Rows stay packed: the last row moves into the place of a finished one, so that every step works on one
block of memory. Equal prompts are read once and copied.

The system message and the schema begin the prompt of every turn and of every rollout of a group, so
:class:`PrefixCache` keeps the keys and values of recent prompts. A prompt is kept only if less than half of it was
cached already, so that the turns of a rollout share one copy.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor

from groundwire.train.policy.constraint import Constraint, Constraints
from groundwire.train.policy.decoding.decoder import Decoder
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


class DecoderBatch(Batch):
    """Requests in rows of one block of memory, with a cache of prompts."""

    def __init__(self, decoder: Decoder, tokenizer: Any, constraints: Constraints, *, max_requests: int) -> None:
        super().__init__(tokenizer, constraints)
        self.prefixes = PrefixCache(decoder.prefix_cache_tokens)
        self._decoder = decoder
        self._max_requests, self._max_length = max_requests, decoder.max_positions
        self._cache = decoder.cache(0, 0)

    def refresh_weights(self) -> None:
        self._decoder.refresh()
        self.prefixes.clear()

    def add(self, arrived: list[OpenReply]) -> None:
        by_prompt = self._by_prompt(arrived)
        known = {prompt: self.prefixes.longest(prompt) for prompt in by_prompt}
        # Sorted by the tokens to read: a prefill call pads its prompts to one length.
        prompts = sorted(by_prompt, key=lambda prompt: len(prompt) - known[prompt][0])
        first, longest = len(self), max(map(len, prompts))
        self._reserve(first + len(arrived), longest + len(prompts[-1]))

        calls: list[list[Prompt]] = [[]]
        for prompt in prompts:
            unread = len(prompt) - known[prompt][0]
            if calls[-1] and unread * (len(calls[-1]) + 1) > self._decoder.prefill_tokens:
                calls.append([])
            calls[-1].append(prompt)
        outputs, row = [], first
        for prompts_of_call in calls:
            outputs.append(self._prefill(prompts_of_call, known, row))
            row += len(prompts_of_call)
        logits = torch.cat(outputs)

        requests = [by_prompt[prompt][0] for prompt in prompts]
        for request in requests:
            request.cached_tokens = known[request.prompt_ids][0]
        copies = [(place, request) for place, prompt in enumerate(prompts) for request in by_prompt[prompt][1:]]
        if copies:
            source = torch.tensor([place for place, _ in copies], device=logits.device)
            self._cache[:, :, row : row + len(copies), :, :longest] = self._cache[:, :, first + source, :, :longest]
            logits = torch.cat([logits, logits[source]])
            for _, request in copies:
                request.cached_tokens = len(request.prompt_ids)
                requests.append(request)
        self._sample(requests, logits)
        self.requests += requests

    def decode(self) -> None:
        requests, device = self.requests, self._decoder.device
        span = max(map(len, requests))
        self._reserve(len(requests), span)
        ids = torch.tensor([[request.token_ids[-1]] for request in requests], device=device)
        positions = torch.tensor([len(request) for request in requests], device=device)[:, None] - 1
        last = torch.zeros(len(requests), dtype=torch.long, device=device)
        self._sample(requests, self._decoder.logits(ids, positions, last, self._cache, first_row=0, span=span))

    def _keep(self, stay: list[int]) -> None:
        requests, count, staying = self.requests, len(stay), set(stay)
        gaps = [i for i in range(count) if i not in staying]
        moved = [i for i in stay if i >= count]
        if gaps:
            span = max(len(requests[i]) for i in moved)
            self._cache[:, :, gaps, :, :span] = self._cache[:, :, moved, :, :span]
            for gap, i in zip(gaps, moved, strict=True):
                requests[gap] = requests[i]
        self.requests = requests[:count]

    def _prefill(
        self, prompts: list[Prompt], known: dict[Prompt, tuple[int, torch.Tensor | None]], first_row: int
    ) -> torch.Tensor:
        """Read ``prompts`` into the cache from ``first_row`` on; the logits after each, [prompts, vocabulary]."""
        starts = [known[prompt][0] for prompt in prompts]
        for row, prompt in enumerate(prompts, first_row):
            length, prefix = known[prompt]
            if prefix is not None:
                self._cache[:, :, row, :, :length] = prefix[:, :, :, :length]
        unread = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        width, device = max(map(len, unread)), self._decoder.device
        ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in unread], device=device)
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
        # Padding may exceed the context. No query attends to it, so its position does not matter.
        positions.clamp_(max=self._max_length - 1)
        last = torch.tensor([len(tokens) - 1 for tokens in unread], device=device)
        span = min(max(starts) + width, self._max_length)
        logits = self._decoder.logits(ids, positions, last, self._cache, first_row=first_row, span=span)
        for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True), first_row):
            if start * 2 < len(prompt):
                self.prefixes.keep(prompt, self._cache[:, :, row, :, : len(prompt)])
        return logits

    def _reserve(self, rows: int, length: int) -> None:
        """Grow the cache to at least ``rows`` and ``length``. Each at least doubles, so that growing is rare."""
        length = min(length, self._max_length)
        old = self._cache
        old_rows, old_length = old.shape[2], old.shape[4]
        if rows <= old_rows and length <= old_length:
            return
        new_rows = old_rows if rows <= old_rows else min(self._max_requests, max(rows, 2 * old_rows))
        new_length = old_length if length <= old_length else min(self._max_length, max(length, 2 * old_length, 64))
        self._cache = self._decoder.cache(new_rows, new_length)
        self._cache[:, :, :old_rows, :, :old_length] = old


class PrefixCache(LRUCache[Prompt, torch.Tensor]):
    """Prompts with their ``[2, layers, key heads, tokens, head width]``, searched by the longest common prefix."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens, getsizeof=lambda cache: cache.shape[3])

    def longest(self, prompt: Prompt) -> tuple[int, torch.Tensor | None]:
        """The number of cached tokens of ``prompt``, and keys and values of at least that many.

        The last token never counts, because its logits are needed.
        """
        best, length = None, 0
        for cached in self:
            end = min(len(cached), len(prompt) - 1)
            # Only a prompt that agrees in one more token than the best one so far is compared token by token.
            if length < end and cached[length] == prompt[length] and cached[:length] == prompt[:length]:
                best = cached
                length = next((i for i in range(length, end) if cached[i] != prompt[i]), end)
        return length, None if best is None else self[best]

    def keep(self, prompt: Prompt, cache: torch.Tensor) -> None:
        """Copy the keys and values of ``prompt``, unless it exceeds the cache."""
        if len(prompt) <= self.maxsize and prompt not in self:
            self[prompt] = cache.clone()
