"""Requests that our own decoder computes, with the keys and values of their prompts and of recent ones.

Cache row ``i`` belongs to request ``i``. Rows stay packed: the last row moves into the place of a finished one, so that
every step works on one block of memory. Equal prompts are read once and copied.

The system message and the schema begin the prompt of every turn and of every rollout of a group, so
:class:`PrefixCache` keeps the keys and values of recent prompts. A prompt is kept only if less than half of it was
cached already, so that the turns of a rollout share one copy.
"""

from __future__ import annotations

from typing import Any

import torch
from cachetools import LRUCache

from groundwire.train.policy.batch import Batch, OpenReply, Prompt
from groundwire.train.policy.constraint import Constraints
from groundwire.train.policy.decoding.decoder import Decoder


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
