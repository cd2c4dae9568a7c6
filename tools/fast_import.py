"""Faster imports: without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["fast_import"]


@contextmanager
def fast_import() -> Iterator[None]:
    """Imports run 25 % faster with the garbage collector off; the objects that exist afterwards are frozen.

    A training run imports most of a million objects. Without freezing them, each collection would stop the rollouts
    for 0.4 s, about once a step, and several more would follow at exit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
