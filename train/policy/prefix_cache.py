"""Keys and values of recent prompts, for prompts that begin in the same way.

The system message and the schema begin the prompt of every turn and of every rollout of a group. The batch keeps a
prompt only if less than half of it was cached already, so that the turns of a rollout share one copy.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

__all__ = ["PrefixCache"]

BLOCK = 16
"""A prompt can be reused up to each multiple of so many tokens."""


class PrefixCache:
    """An LRU cache of prompts that is searched by the longest common prefix."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._tokens = max_tokens, 0
        self._kept: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._begins: dict[int, tuple[int, ...]] = {}  # by the hash of a beginning

    def clear(self) -> None:
        """Remove everything, because the weights have changed."""
        self._kept.clear()
        self._begins.clear()
        self._tokens = 0

    @staticmethod
    def _marks(prompt: tuple[int, ...]) -> list[tuple[int, int]]:
        """(length, hash of so many tokens) at each block's end and before the last token, the longest first.

        The last token is always read again, because its logits are needed.
        """
        marks, value = [], 0
        end = len(prompt) - 1
        for at in range(0, end, BLOCK):
            stop = min(at + BLOCK, end)
            value = hash((value, prompt[at:stop]))
            marks.append((stop, value))
        return marks[::-1]

    def longest(self, prompt: tuple[int, ...]) -> tuple[int, torch.Tensor | None]:
        """The number of cached tokens of ``prompt``, and ``[2, layers, key heads, at least so many, head width]``."""
        for length, value in self._marks(prompt):
            owner = self._begins.get(value)
            if owner is not None and owner[:length] == prompt[:length]:
                self._kept.move_to_end(owner)
                return length, self._kept[owner]
        return 0, None

    def keep(self, prompt: tuple[int, ...], cache: torch.Tensor) -> None:
        """Copy the keys and values of ``prompt``, ``[2, layers, key heads, len(prompt), head width]``."""
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
