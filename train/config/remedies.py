"""Which changes of settings would help a run that does not fit: only those are named in its error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["remedies"]


def remedies(changes: Mapping[str, Mapping[str, Any]], fits: Callable[..., bool]) -> str:
    """The names of those ``changes`` that each make the run fit, else of as few as do so together; empty if none do.

    ``fits`` gets the values of a change. Of several changes together the first ones are left out first.
    """
    if alone := [name for name, values in changes.items() if fits(**values)]:
        return " or ".join(alone)
    needed = dict(changes)
    if not fits(**_merged(needed)):
        return ""
    for name in changes:
        rest = {other: values for other, values in needed.items() if other != name}
        if fits(**_merged(rest)):
            needed = rest
    return " and ".join(needed)


def _merged(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for values in changes.values() for name, value in values.items()}
