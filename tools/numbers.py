"""The numbers that rewards and scores may be, and those that JSON has no form for."""

from __future__ import annotations

import math
from numbers import Rational, Real
from typing import Any

MAX_REWARD, MAX_METRIC = 1e15, 1e30
"""The largest reward, and the largest metric beside one; minus it is the least. The sums over a run are finite, those
of the squares of rewards also in single precision.
"""


class NumberRangeError(ValueError):
    """A number that is not finite, or beyond ``most``."""

    def __init__(self, most: float = MAX_REWARD) -> None:
        super().__init__(f"it must lie between {-most:g} and {most:g}: clip or scale it")


def reward_number(value: Any, most: float = MAX_REWARD) -> float:
    """``value`` as a float.

    A number is whatever Python, NumPy, torch or ``decimal`` call one: ``True``, an array or a tensor of one element.
    Raises :class:`NumberRangeError`; ``TypeError``, or what its own conversion raises, if it is none.
    """
    element = getattr(value, "item", None)
    value = element() if callable(element) else value  # of an array or a tensor; raises for more than one
    if isinstance(value, str | bytes | bytearray):
        raise TypeError("text is no number")
    try:
        number = float(value)
    except OverflowError as error:  # of an int or a fraction
        raise NumberRangeError(most) from error
    if not abs(number) <= most:
        raise NumberRangeError(most)
    return number


def check_finite(value: Any) -> None:
    """Raises ``ValueError``, with its path, for a number in tables and lists that JSON has no form for."""
    if path := _not_finite(value):
        *names, number = path
        raise ValueError(
            f"{'.'.join(map(str, names)) or 'it'} is {number}, which is no number in JSON: use null, or leave it out"
        )


def _not_finite(value: Any) -> tuple[Any, ...]:
    """The names that lead to the first such number, then itself; empty if there is none."""
    if isinstance(value, Real) and not isinstance(value, Rational):  # of Python or NumPy
        return () if math.isfinite(value) else (value,)
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return next(((name, *path) for name, child in pairs if (path := _not_finite(child))), ())
