"""Hashes of a prompt's first parts, from which it is known how much of two prompts is equal."""

from __future__ import annotations

import itertools
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["DIGITS", "PREFIXES", "equal_hashes", "prefix_hashes", "shared_tokens"]

PREFIXES = [round(64 * 2 ** (number / 8)) for number in range(97)]
"""The lengths of the parts that have a hash: from 64 tokens to 262,144."""
DIGITS = 4
"""Of a hash. Two parts with the same one only lead to a worse use of the GPUs."""


def prefix_hashes(prompt: Sequence[int]) -> str:
    """The hashes of the prompt's first parts, from the shortest on: equal beginnings have equal first hashes."""
    tokens, hashes, before, value = memoryview(array("q", prompt)).cast("B"), "", 0, 0
    for length in itertools.takewhile(lambda length: length <= len(prompt), PREFIXES):
        value = zlib.crc32(tokens[before * 8 : length * 8], value)
        hashes, before = hashes + f"{value & 0xFFFF:0{DIGITS}x}", length
    return hashes


def shared_tokens(before: str, after: str) -> int:
    """The longest part, in tokens, that is known to be equal in two prompts with these hashes."""
    number = equal_hashes(before, after)
    return PREFIXES[number - 1] if number else 0


def equal_hashes(before: str, after: str) -> int:
    """How many first hashes are equal. Each covers all tokens before, so the first unequal one is found by halving."""
    most = min(len(before), len(after)) // DIGITS
    return bisect_left(range(DIGITS, (most + 1) * DIGITS, DIGITS), True, key=lambda end: before[:end] != after[:end])
