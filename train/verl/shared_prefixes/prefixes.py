"""How much of two prompts is equal, by hashes of their prefixes, and which calls shall have the same route."""

from __future__ import annotations

import itertools
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from cachetools import LRUCache

PREFIXES = [round(64 * 2 ** (number / 8)) for number in range(97)]
"""The lengths of the prefixes that have a hash: from 64 tokens to 262,144."""
DIGITS = 4
"""Of a hash. Two prefixes with the same one only lead to a worse use of the GPUs."""
REMEMBERED = 100_000
"""Rollouts, prompts and prefixes (a prompt of 900 tokens has 31); a rollout that is forgotten gets any route."""
_KEYS_PER_SERVER = 16
"""The fewest keys of a step for each server. The load balancer chooses a server by the open requests of the moment, and
does not know how many will follow with the same key: the fewer keys, the less equal the servers' shares are."""


def prefix_hashes(prompt: Sequence[int]) -> str:
    """The hashes of the prompt's prefixes, from the shortest on: equal beginnings have equal first hashes."""
    tokens, hashes, before, value = memoryview(array("q", prompt)).cast("B"), "", 0, 0
    for length in itertools.takewhile(lambda length: length <= len(prompt), PREFIXES):
        value = zlib.crc32(tokens[before * 8 : length * 8], value)
        hashes, before = hashes + f"{value & 0xFFFF:0{DIGITS}x}", length
    return hashes


def shared_tokens(before: str, after: str) -> int:
    """The longest prefix, in tokens, that is known to be equal in two prompts with these hashes."""
    number = equal_hashes(before, after)
    return PREFIXES[number - 1] if number else 0


def equal_hashes(before: str, after: str) -> int:
    """How many first hashes are equal. Each covers all tokens before, so the first unequal one is found by halving."""
    most = min(len(before), len(after)) // DIGITS
    return bisect_left(range(DIGITS, (most + 1) * DIGITS, DIGITS), True, key=lambda end: before[:end] != after[:end])


def rollouts_together(groups: int, group_size: int, servers: int) -> int:
    """How many rollouts of a group share a route: all of them, or fewer if the step has few groups."""
    return max(1, min(group_size, groups * group_size // (_KEYS_PER_SERVER * servers)))


class RouteKeys:
    """Keys for verl's client, for at most ``together`` rollouts each: all calls of a rollout have one key."""

    def __init__(self, together: int) -> None:
        self._together = together
        self._keys: LRUCache[str, str] = LRUCache(REMEMBERED)
        self._rollouts: LRUCache[int, int] = LRUCache(REMEMBERED)

    def key(self, session: str, prompt_ids: Sequence[int]) -> str:
        """The key of a request of the rollout ``session``: that of its first request."""
        if (key := self._keys.get(session)) is None:
            prompt = hash(tuple(prompt_ids))
            number = self._rollouts[prompt] = self._rollouts.get(prompt, -1) + 1
            key = self._keys[session] = f"{prompt:x}-{number // self._together}"
        return key
