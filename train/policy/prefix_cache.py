"""Prompts that begin alike are read once.

The system message and the schema stand before every turn of a rollout, in every rollout of a group. A prompt is kept
only where less than half of it was known already: the turns of a rollout then share one copy, instead of filling the
cache with beginnings that are all the same.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

__all__ = ["PrefixCache"]

BLOCK = 16
"""Tokens between two places at which a kept prompt can be resumed."""


class PrefixCache:
    """Keys and values of recent prompts, found again by how a later prompt begins; the least recently used go first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._tokens = max_tokens, 0
        self._kept: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._begins: dict[int, tuple[int, ...]] = {}

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._kept.clear()
        self._begins.clear()
        self._tokens = 0

    @staticmethod
    def _marks(prompt: tuple[int, ...]) -> list[tuple[int, int]]:
        """(length, hash of so many tokens) at each block's end and before the last token, the longest first.

        The last token is always read again, because its logits are what is asked for.
        """
        marks, value = [], 0
        end = len(prompt) - 1
        for at in range(0, end, BLOCK):
            stop = min(at + BLOCK, end)
            value = hash((value, prompt[at:stop]))
            marks.append((stop, value))
        return marks[::-1]

    def longest(self, prompt: tuple[int, ...]) -> tuple[int, torch.Tensor | None]:
        """How many tokens of ``prompt`` are known, and ``[2, layers, key heads, at least so many, head width]``."""
        for length, value in self._marks(prompt):
            owner = self._begins.get(value)
            if owner is not None and owner[:length] == prompt[:length]:
                self._kept.move_to_end(owner)
                return length, self._kept[owner]
        return 0, None

    def keep(self, prompt: tuple[int, ...], cache: torch.Tensor) -> None:
        """Remember ``prompt`` with its ``[2, layers, key heads, len(prompt), head width]`` of the cache, as a copy."""
        if len(prompt) > self._max_tokens or prompt in self._kept:
            return
        while self._tokens + len(prompt) > self._max_tokens:
            old, _ = self._kept.popitem(last=False)
            self._tokens -= len(old)
            for _, value in self._marks(old):
                if self._begins.get(value) == old:
                    del self._begins[value]
        self._kept[prompt] = cache.clone()
        self._tokens += len(prompt)
        for _, value in self._marks(prompt):
            self._begins[value] = prompt
