"""Divides a step's rows among the GPUs so that the rows of a group stay together.

verl divides rows by their lengths alone, which spreads each group over all GPUs. With shared prompts
(:mod:`.shared_prompts`) each GPU would then compute almost every prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.train.verl.patching import patched

__all__ = ["divide_rows", "keep_groups_together"]

_GRADIENT_COST = 4
"""The cost of a row with a gradient, where that of a row without is 1: both need a forward pass for old
log-probabilities, and only the first an update, which takes about three times as long."""


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

    The group of a row is its key before the first ``_``. The most expensive group goes first, to the rank with the
    lowest cost so far (Graham, 1969, "Bounds on multiprocessing timing anomalies"). A group is divided only if no rank
    has room for all of it. Within a rank, groups and rows keep their order, which verl's mini-batches follow.
    """
    groups: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key.partition("_")[0], []).append(row)
    room, costs = [len(keys) // ranks] * ranks, [0] * ranks
    parts: list[list[list[int]]] = [[] for _ in range(ranks)]
    waiting = sorted(groups.values(), key=lambda rows: _cost(rows, tags))
    while waiting:
        rows = waiting.pop()
        large_enough = [rank for rank in range(ranks) if room[rank] >= len(rows)]
        rank = min(large_enough, key=costs.__getitem__) if large_enough else max(range(ranks), key=room.__getitem__)
        part, rest = rows[: room[rank]], rows[room[rank] :]
        parts[rank].append(part)
        room[rank] -= len(part)
        costs[rank] += _cost(part, tags)
        if rest:
            waiting.append(rest)
    return [[row for rows in sorted(part) for row in rows] for part in parts]


def _cost(rows: Sequence[int], tags: Sequence[Mapping[str, Any]]) -> int:
    """The cost of rows of one group: the tokens of its shortest prompt once, and those after it in each row."""
    shared = min(tags[row]["prompt_len"] for row in rows)
    own = sum(tags[row]["seq_len"] - shared for row in rows)
    return (shared + own) * (_GRADIENT_COST if any(tags[row].get("has_gradient", True) for row in rows) else 1)
