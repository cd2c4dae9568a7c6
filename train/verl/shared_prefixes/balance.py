"""Divides a step's rows among the GPUs so that rows with a common prompt stay together.

verl divides rows by their lengths alone, which spreads each group over all GPUs, and each of them would compute almost
every prompt. Groups often share most of their prompts, too: two questions about one database differ in the last
tokens. The tags of the rows say so (:mod:`.prefixes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groundwire.train.verl.shared_prefixes.prefixes import DIGITS, equal_hashes, shared_tokens

_GRADIENT_COST = 4
"""The cost of a row with a gradient, where that of a row without is 1: both need a forward pass for old
log-probabilities, and only the first an update, which takes about three times as long."""
_UNITS_PER_RANK = 4  # groups that begin alike are divided if they cost more than a GPU's work divided by this


def divide_rows(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], ranks: int) -> list[list[int]]:
    """The rows of each rank, as indices; all ranks have the same number, so ``ranks`` must divide that of the rows.

    The group of a row is its key before the first ``_``. Groups that begin alike are a unit. The most expensive unit
    goes first, to the rank with the lowest cost so far (Graham, 1969, "Bounds on multiprocessing timing anomalies"). A
    unit is divided into its groups, and a group into rows, only if no rank has room for all of it. Within a rank,
    groups and rows keep their order, which verl's mini-batches follow.

    An example: two ranks with room for four rows each, replies of 10 tokens, and three groups::

        a: 4 rows, prompt of 100 tokens: 100 + 4 * 10 = 140 to compute
        b: 2 rows, prompt of 90 tokens:   90 + 2 * 10 = 110
        c: 2 rows, prompt of 70 tokens:   70 + 2 * 10 =  90, of which 64 are also the first tokens of b

    b and c together are 110 + 90 - 64 = 136 tokens. In a step with more groups they would be one unit; here they cost
    more than a quarter of a rank's work, and are placed one by one. a is first, on rank 0, and b on rank 1, which alone
    has room for c: 140 and 136 tokens.
    """
    groups = _groups(keys, tags)
    places = [_Rank(room=len(keys) // ranks) for _ in range(ranks)]
    waiting = sorted(_units(groups, _cost(groups) / ranks / _UNITS_PER_RANK), key=_cost)
    while waiting:
        unit = waiting.pop()
        with_room = [place for place in places if place.room >= sum(len(group.rows) for group in unit)]
        if with_room:
            min(with_room, key=lambda place: place.cost).add(unit)
        elif len(unit) > 1:
            waiting = sorted([*waiting, *([group] for group in unit)], key=_cost)
        else:  # As many rows as possible stay together. The rest is the next to be placed, while there is most room.
            emptiest = max(places, key=lambda place: place.room)
            first, rest = unit[0].divided(emptiest.room)
            emptiest.add([first])
            waiting.append([rest])
    return [[row for rows in sorted(place.rows) for row in rows] for place in places]


@dataclass
class _Rank:
    """What one GPU has got so far, and for how many more rows it has room."""

    room: int
    cost: int = 0
    rows: list[list[int]] = field(default_factory=list)

    def add(self, unit: Sequence[_Group]) -> None:
        self.rows += [group.rows for group in unit]
        self.room -= sum(len(group.rows) for group in unit)
        self.cost += _cost(unit)


class _Group:
    """Rows of one group.

    ``tokens`` is what a rank computes for them beside the ``common`` first tokens of all prompts of the step, which
    every rank computes anyway: the shortest prompt once (later turns continue it), and what follows it in each row.
    """

    def __init__(self, rows: list[int], tags: Sequence[Mapping[str, Any]], common: int) -> None:
        self.rows, self.common, self._tags = rows, common, tags
        self.hashes: str = tags[rows[0]].get("prefix_hashes", "")
        shared = min(tags[row]["prompt_len"] for row in rows)
        self.tokens: int = max(0, shared - common) + sum(tags[row]["seq_len"] - shared for row in rows)
        self.weight = _GRADIENT_COST if any(tags[row].get("has_gradient", True) for row in rows) else 1

    def divided(self, first: int) -> tuple[_Group, _Group]:
        """The first rows, and the others."""
        rows, tags, common = self.rows, self._tags, self.common
        return _Group(rows[:first], tags, common), _Group(rows[first:], tags, common)


def _groups(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> list[_Group]:
    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows_of.setdefault(key.partition("_")[0], []).append(row)
    # Equal hashes are at the front, so the first and the last in their order have in common what all have.
    hashes = sorted(filter(None, (tags[rows[0]].get("prefix_hashes", "") for rows in rows_of.values())))
    common = shared_tokens(hashes[0], hashes[-1]) if hashes else 0
    return [_Group(rows, tags, common) for rows in rows_of.values()]


def _cost(groups: Sequence[_Group]) -> int:
    """The cost of groups of one rank, each without what it shares with the one before."""
    ordered = sorted(groups, key=lambda group: group.hashes)
    saved = sum(
        max(0, shared_tokens(before.hashes, group.hashes) - group.common) * min(before.weight, group.weight)
        for before, group in itertools.pairwise(ordered)
    )
    return sum(group.tokens * group.weight for group in groups) - saved


def _units(groups: list[_Group], most: float) -> list[list[_Group]]:
    """Groups that begin alike together, unless they cost more than ``most``: then longer prefixes tell them apart.

    With the hashes ``a b c``, ``a b d`` and ``a e`` (each letter that of a longer prefix) all three are a unit, if they
    are cheap enough; else the first two are one, and the third is another.
    """
    if len(groups) == 1 or _cost(groups) <= most:
        return [groups]
    hashes = [group.hashes for group in groups]
    known = equal_hashes(min(hashes), max(hashes)) * DIGITS
    if known == len(max(hashes)):  # no hash tells them apart
        return [[group] for group in groups]
    by_next_hash: dict[str, list[_Group]] = {}
    for group in groups:
        by_next_hash.setdefault(group.hashes[: known + DIGITS], []).append(group)
    return [unit for alike in by_next_hash.values() for unit in _units(alike, most)]
