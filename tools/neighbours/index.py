"""Where the neighbours of a database are: a folder ``neighbours`` beside its file, with an index by gold query."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from cachetools import LRUCache, cached
from pydantic import TypeAdapter

from groundwire.tools.files import first_error, read_json
from groundwire.tools.sql import connections

__all__ = ["FOLDER", "INDEX", "NeighboursError", "neighbours_of", "read_counts", "write_index"]

FOLDER, INDEX = "neighbours", "index.json"
_GOLDS = TypeAdapter(dict[str, list[str]])


class NeighboursError(Exception):
    """There are no neighbours for a gold, or their index cannot be read."""


def neighbours_of(database: str, gold: str) -> list[str]:
    """The paths of the neighbours on which an answer to ``gold`` must be right. Raises :class:`NeighboursError`."""
    file = os.path.join(os.path.dirname(database), FOLDER, INDEX)
    try:
        golds = _read(file, connections.signature(file))
    except OSError as error:
        raise NeighboursError(f"{database} has no neighbours; prepare the data with --neighbours") from error
    try:
        return golds[gold]
    except KeyError as error:
        raise NeighboursError(
            f"{file} does not have the gold query {gold!r}; prepare the data again with --neighbours"
        ) from error


@cached(LRUCache(maxsize=1024), lock=threading.Lock())
def _read(file: str, _signature: tuple[int, ...]) -> Mapping[str, list[str]]:
    folder = Path(file).parent
    try:
        golds = read_json(Path(file))["golds"]
    except (ValueError, TypeError, KeyError) as error:
        raise NeighboursError(f"{file} is no index of neighbours ({error!r}); prepare the data again") from error
    if problem := first_error(_GOLDS, golds):
        raise NeighboursError(f"{file}: {problem}; prepare the data again")
    outside = next((name for names in golds.values() for name in names if Path(name).name != name or name == ".."), "")
    if outside:
        raise NeighboursError(f"{file} names {outside!r}, which is no file of its folder; prepare the data again")
    return {gold: [str(folder / name) for name in names] for gold, names in golds.items()}


def write_index(folder: Path, made_of: str, golds: Mapping[str, Sequence[str]], **counts: int) -> None:
    """Write the index of ``folder``. ``made_of`` is a hash of the data that the neighbours were made of."""
    content = {"made_of": made_of, **counts, "golds": golds}
    (folder / INDEX).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_counts(folder: Path, made_of: str) -> dict[str, int] | None:
    """The counts in the index of ``folder``; None if its neighbours were made of other data."""
    try:
        content = read_json(folder / INDEX)
        if content["made_of"] != made_of:
            return None
        return {name: int(value) for name, value in content.items() if name not in ("made_of", "golds")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
