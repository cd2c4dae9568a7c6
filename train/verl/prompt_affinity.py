"""Decides which rollouts share a server: those that begin with the same prompt, whose computation the server keeps."""

from __future__ import annotations

from collections.abc import Sequence

from cachetools import LRUCache

__all__ = ["PromptAffinity", "rollouts_together"]

_REMEMBERED = 100_000
"""Rollouts and prompts; a rollout that is forgotten begins again on any server."""
_KEYS_PER_SERVER = 16
"""At least as many. verl does not know how many requests of a new key will follow. So with four, one of two servers got
a sixth more than its share of 12 groups of 8 that arrived in about their order; with 16 a twentieth."""


def rollouts_together(groups: int, group_size: int, servers: int) -> int:
    """How many rollouts of a group share a server: all of them, or fewer if the step has few groups."""
    return max(1, min(group_size, groups * group_size // (_KEYS_PER_SERVER * servers)))


class PromptAffinity:
    """Keys for verl's client: requests with the same key go to the same server (:mod:`.prompt_router`).

    At most ``together`` rollouts have the same key.
    """

    def __init__(self, together: int) -> None:
        self._together = together
        self._keys: LRUCache[str, str] = LRUCache(_REMEMBERED)
        self._rollouts: LRUCache[int, int] = LRUCache(_REMEMBERED)

    def key(self, session: str, prompt_ids: Sequence[int]) -> str:
        """The key of a request of the rollout ``session``: that of its first request."""
        if (key := self._keys.get(session)) is None:
            prompt = hash(tuple(prompt_ids))
            number = self._rollouts[prompt] = self._rollouts.get(prompt, -1) + 1
            key = self._keys[session] = f"{prompt:x}-{number // self._together}"
        return key
