"""Keys and values of recent prompts, for prompts that begin in the same way.

The system message and the schema begin the prompt of every turn and of every rollout of a group. The batch keeps a
prompt only if less than half of it was cached already, so that the turns of a rollout share one copy.
"""

from __future__ import annotations

import torch
from cachetools import LRUCache

__all__ = ["PrefixCache"]

BLOCK = 16
"""A prompt can be reused up to each multiple of so many tokens."""

_Prompt = tuple[int, ...]


class PrefixCache(LRUCache[_Prompt, torch.Tensor]):
    """Prompts with their ``[2, layers, key heads, tokens, head width]``, searched by the longest common prefix."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens, getsizeof=lambda cache: cache.shape[3])
        self._owners: dict[int, _Prompt] = {}  # of a prefix, by its hash

    def longest(self, prompt: _Prompt) -> tuple[int, torch.Tensor | None]:
        """The number of cached tokens of ``prompt``, and the keys and values of at least so many.

        The last token never counts, because its logits are needed.
        """
        for length, value in _prefixes(prompt):
            owner = self._owners.get(value)
            if owner is not None and owner[:length] == prompt[:length]:
                return length, self[owner]
        return 0, None

    def keep(self, prompt: _Prompt, cache: torch.Tensor) -> None:
        """Copy the keys and values of ``prompt``, unless it exceeds the cache."""
        if len(prompt) > self.maxsize or prompt in self:
            return
        self[prompt] = cache.clone()
        for _, value in _prefixes(prompt):
            self._owners[value] = prompt

    def popitem(self) -> tuple[_Prompt, torch.Tensor]:
        """Remove the least recently used prompt."""
        prompt, cache = super().popitem()
        for _, value in _prefixes(prompt):
            if self._owners.get(value) == prompt:
                del self._owners[value]
        return prompt, cache

    def clear(self) -> None:
        """Remove all prompts."""
        super().clear()
        self._owners.clear()


def _prefixes(prompt: _Prompt) -> list[tuple[int, int]]:
    """(length, hash) of the prefixes up to each block's end and up to the last token, the longest first."""
    prefixes, value = [], 0
    end = len(prompt) - 1
    for start in range(0, end, BLOCK):
        stop = min(start + BLOCK, end)
        value = hash((value, prompt[start:stop]))
        prefixes.append((stop, value))
    return prefixes[::-1]
