"""Importing in less time: Python's garbage collector takes a share of it, of what follows, and of the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]


@contextmanager
def importing() -> Iterator[None]:
    """Imports take a quarter less while nobody looks for garbage among what they make.

    What there is afterwards stays, and is never looked through again. For a training run it is most of a million
    objects: each collection would stop the rollouts for 0.4 s, about once a step, and several follow at the exit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
