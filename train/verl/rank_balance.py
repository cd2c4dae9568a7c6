"""Divides a step's rows among the GPUs so that rows with a common prompt stay together.

verl divides rows by their lengths alone, which spreads each group over all GPUs. With shared prompts
(:mod:`.shared_prompts`) each GPU would then compute almost every prompt. Groups often share most of their prompts, too:
two questions about one database differ in the last tokens. The tags of the rows say so (:mod:`.prefix_hashes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.train.verl.patching import patched
from groundwire.train.verl.prefix_hashes import DIGITS, equal_hashes, shared_tokens

__all__ = ["divide_rows", "keep_groups_together"]

_GRADIENT_COST = 4
"""The cost of a row with a gradient, where that of a row without is 1: both need a forward pass for old
log-probabilities, and only the first an update, which takes about three times as long."""
_PARTS_PER_RANK = 4
"""Groups that begin alike are divided if they cost more than a GPU's work divided by this."""


def keep_groups_together() -> None:
    """verl's trainer in this process divides its rows with :func:`divide_rows` from now on."""
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils.seqlen_balancing import log_seqlen_unbalance

    balance = trainer_base.PPOTrainer._balance_batch

    def balance_batch(
        self: Any, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", **options: Any
    ) -> Any:
        """As verl's, which first adds the rows of padding, with another order of the rows."""
        with patched(trainer_base, "get_seqlen_balanced_partitions", lambda _: _in_order):
            batch = balance(self, batch, metrics, logging_prefix, **options)
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        if ranks > 1:
            parts = divide_rows(batch.keys, batch.tags, ranks)
            lengths = [tag["seq_len"] for tag in batch.tags]
            metrics.update(log_seqlen_unbalance(lengths, parts, logging_prefix))
            batch.reorder([row for part in parts for row in part])
        return batch

    trainer_base.PPOTrainer._balance_batch = balance_batch


def _in_order(costs: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Parts of equal size, with the rows in their order. verl's own division takes 0.2 ms a row, for no use here."""
    size = len(costs) // k_partitions
    return [list(range(part * size, (part + 1) * size)) for part in range(k_partitions)]


def divide_rows(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], ranks: int) -> list[list[int]]:
    """The rows of each rank, as indices; all ranks have the same number, so ``ranks`` must divide that of the rows.

    The group of a row is its key before the first ``_``. Groups that begin alike are a unit. The most expensive unit
    goes first, to the rank with the lowest cost so far (Graham, 1969, "Bounds on multiprocessing timing anomalies"). A
    unit is divided into its groups, and a group into rows, only if no rank has room for all of it. Within a rank,
    groups and rows keep their order, which verl's mini-batches follow.
    """
    by_name: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        by_name.setdefault(key.partition("_")[0], []).append(row)
    common = _common([tags[rows[0]].get("prefix_hashes", "") for rows in by_name.values()])
    groups = [_Group(rows, tags, common) for rows in by_name.values()]
    room, costs = [len(keys) // ranks] * ranks, [0] * ranks
    parts: list[list[list[int]]] = [[] for _ in range(ranks)]
    waiting = sorted(_units(groups, _cost(groups) / ranks / _PARTS_PER_RANK), key=_cost)
    while waiting:
        unit = waiting.pop()
        size = sum(len(group.rows) for group in unit)
        large_enough = [rank for rank in range(ranks) if room[rank] >= size]
        if not large_enough and len(unit) > 1:
            waiting = sorted([*waiting, *([group] for group in unit)], key=_cost)
            continue
        if large_enough:
            rank = min(large_enough, key=costs.__getitem__)
        else:
            rank, rows = max(range(ranks), key=room.__getitem__), unit[0].rows
            unit = [_Group(rows[: room[rank]], tags, common)]
            waiting.append([_Group(rows[room[rank] :], tags, common)])
        parts[rank] += [group.rows for group in unit]
        room[rank] -= min(size, room[rank])
        costs[rank] += _cost(unit)
    return [[row for rows in sorted(part) for row in rows] for part in parts]


class _Group:
    """Rows of one group. ``tokens`` counts the shortest prompt once, and what follows it in each row.

    Without the first ``common`` ones, which every rank computes.
    """

    def __init__(self, rows: list[int], tags: Sequence[Mapping[str, Any]], common: int) -> None:
        self.rows, self.common = rows, common
        self.hashes: str = tags[rows[0]].get("prefix_hashes", "")
        shared = min(tags[row]["prompt_len"] for row in rows)
        self.tokens: int = max(0, shared - common) + sum(tags[row]["seq_len"] - shared for row in rows)
        self.weight = _GRADIENT_COST if any(tags[row].get("has_gradient", True) for row in rows) else 1


def _cost(groups: Sequence[_Group]) -> int:
    """The cost of groups of one rank, each without what it shares with the one before."""
    ordered = sorted(groups, key=lambda group: group.hashes)
    saved = sum(
        max(0, shared_tokens(before.hashes, group.hashes) - group.common) * min(before.weight, group.weight)
        for before, group in itertools.pairwise(ordered)
    )
    return sum(group.tokens * group.weight for group in groups) - saved


def _common(hashes: Sequence[str]) -> int:
    """The longest prefix, in tokens, that is known to be common to all prompts that have hashes."""
    found = sorted(filter(None, hashes))
    return shared_tokens(found[0], found[-1]) if found else 0


def _units(groups: list[_Group], most: float) -> list[list[_Group]]:
    """Groups that begin alike together: with more tokens in common where they would cost more than ``most``."""
    if len(groups) == 1 or _cost(groups) <= most:
        return [groups]
    hashes = [group.hashes for group in groups]
    known = equal_hashes(min(hashes), max(hashes)) * DIGITS
    if known == len(max(hashes)):
        return [[group] for group in groups]
    alike: dict[str, list[_Group]] = {}
    for group in groups:
        alike.setdefault(group.hashes[: known + DIGITS], []).append(group)
    return [unit for part in alike.values() for unit in _units(part, most)]
