"""What is replaced in verl 0.9.1 and in Ray, where they have no setting for it: :data:`PATCHES` is all of it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any

from groundwire.train.config.verl_names import OWN_ESTIMATOR
from groundwire.train.verl.rows import PADDED_COLUMNS, READ_COLUMNS
from groundwire.train.verl.shared_prefixes.balance import divide_rows

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
PATCHES: Mapping[str, str] = {
    # -- In the process of verl's trainer, from the creation of the manager on (patch_trainer):
    # verl divides rows among GPUs by length alone, whatever trainer.balance_batch is, and so each group among all.
    "trainer_base.PPOTrainer._balance_batch": _TRAINER,
    # During _balance_batch: its order is replaced afterwards, and computing it takes time for each row.
    "trainer_base.get_seqlen_balanced_partitions": _TRAINER,
    # With bypass_mode it reads a column and writes it under another name, which our rows have from the start.
    "trainer_base.PPOTrainer._compute_old_log_prob": _TRAINER,
    # It reads six columns to compute advantages, which our rows have from the start.
    "trainer_base.PPOTrainer._compute_advantage": _TRAINER,
    # During _compute_advantage, which also measures how far sampler and trainer differ: ours returns the rows' own.
    "trainer_base.compute_advantage_for_multi_trajectories": _TRAINER,
    # A row of padding copies the columns of another, and ours with a value per token then have the wrong length.
    "padding_utils.construct_minimal_padding_template": "verl.trainer.ppo.padding_utils",
    # -- In verl's workers, during a mini-batch (shared_prefixes.engine):
    # It divides rows by length; ours keeps common prefixes together, and leaves out rows without a gradient.
    "transformer_impl.prepare_micro_batches": "verl.workers.engine.fsdp.transformer_impl",
    # It computes logits for every token; ours for those with a loss.
    "torch_functional.FusedLinearForPPO": "verl.utils.experimental.torch_functional",
    # -- In the process that starts the run, around Ray's start (ray_job):
    # verl calls it; what follows puts the run's keys where its processes find them, and not into runtime_env.
    "ray.init": "ray",
    # The first job of each Ray has number 1, and verl names the socket for the weights in /tmp after it
    # (verl/workers/rollout/vllm_rollout/vllm_rollout.py): two runs on one host would wait for each other.
    "state.next_job_id": "ray._private.state",
}
"""What is replaced, with the module in which verl or Ray looks it up, and before each entry why."""


def patch(name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace ``name``, one of :data:`PATCHES`, by what ``wrap`` makes of it. The result puts it back."""
    classes, _, attribute = name.partition(".")[2].rpartition(".")
    owner = pkgutil.resolve_name(f"{PATCHES[name]}:{classes}")
    original = getattr(owner, attribute)
    setattr(owner, attribute, wrap(original))
    return lambda: setattr(owner, attribute, original)


@contextmanager
def patched(name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """:func:`patch` inside of the block."""
    undo = patch(name, wrap)
    try:
        yield
    finally:
        undo()


# -- What verl's trainer does in its own process. ``verls`` is the function of verl's that is replaced.


def patch_trainer(*, shared_prefixes: bool) -> None:
    """verl's trainer in this process takes old log-probabilities and advantages from the rows from now on.

    Its workers read only the columns that they use (:data:`.READ_COLUMNS`). With ``shared_prefixes`` their engine
    is :mod:`.shared_prefixes.engine`, and rows are divided among GPUs as :func:`.divide_rows` says.
    """

    patch("trainer_base.PPOTrainer._compute_old_log_prob", lambda verls: partialmethod(_old_log_prob_of_rows, verls))
    patch("trainer_base.PPOTrainer._compute_advantage", lambda verls: partialmethod(_advantage_of_rows, verls))
    patch("padding_utils.construct_minimal_padding_template", lambda verls: partial(_short_padding, verls))
    if shared_prefixes:
        patch("trainer_base.PPOTrainer._balance_batch", lambda verls: partialmethod(_groups_together, verls))


def _limit_columns(batch: Any, config: Any) -> None:
    from verl.trainer.ppo.utils import need_critic

    if not need_critic(config):  # a critic reads all columns
        batch.fields = list(READ_COLUMNS)


def _bypasses(config: Any) -> bool:
    """Whether the sampler's log-probabilities are the old ones in this step."""
    correction = config.algorithm.get("rollout_correction")
    return bool(correction and correction.get("bypass_mode"))


def _old_log_prob_of_rows(trainer: Any, verls: Callable[..., Any], batch: Any, metrics: dict[str, Any]) -> Any:
    _limit_columns(batch, trainer.config)
    return batch if _bypasses(trainer.config) else verls(trainer, batch, metrics)


def _advantage_of_rows(trainer: Any, verls: Callable[..., Any], batch: Any, metrics: dict[str, Any]) -> Any:
    """verl's also measures how far sampler and trainer differ, so it runs after a pass for log-probabilities."""
    if trainer.config.algorithm.adv_estimator != OWN_ESTIMATOR:
        return verls(trainer, batch, metrics)
    if _bypasses(trainer.config):
        return batch
    import transfer_queue

    rows = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
    advantages = rows["advantages"].to_padded_tensor(0.0)

    def of_rows(data: Any, **_: Any) -> Any:
        """Those of the rows, float32 [rows, tokens], without the tokens that verl has rejected."""
        data.batch["advantages"] = data.batch["returns"] = advantages * data.batch["response_mask"]
        return data

    with patched("trainer_base.compute_advantage_for_multi_trajectories", lambda _: of_rows):
        batch = verls(trainer, batch, metrics)
    _limit_columns(batch, trainer.config)
    return batch


def _short_padding(verls: Callable[..., Any], *arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of one token without a loss."""
    import torch

    row, tag = verls(*arguments)
    row.update({name: torch.zeros(1) for name in PADDED_COLUMNS if name in row})
    return row, tag


def _groups_together(
    trainer: Any,
    verls: Callable[..., Any],
    batch: Any,
    metrics: dict[str, Any],
    logging_prefix: str = "global_seqlen",
    **options: Any,
) -> Any:
    """verl's, which first adds the rows of padding, with another order of the rows."""
    from verl.utils.seqlen_balancing import log_seqlen_unbalance

    with patched("trainer_base.get_seqlen_balanced_partitions", lambda _: _in_order):
        batch = verls(trainer, batch, metrics, logging_prefix, **options)
    ranks = max(trainer.actor_rollout_wg._dispatch_info["actor"]) + 1
    if ranks > 1:
        rows_of_ranks = divide_rows(batch.keys, batch.tags, ranks)
        lengths = [tag["seq_len"] for tag in batch.tags]
        metrics.update(log_seqlen_unbalance(lengths, rows_of_ranks, logging_prefix))
        batch.reorder([row for rows in rows_of_ranks for row in rows])
    return batch


def _in_order(costs: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Parts of equal size, with the rows in their order."""
    size = len(costs) // k_partitions
    return [list(range(start, start + size)) for start in range(0, k_partitions * size, size)]
