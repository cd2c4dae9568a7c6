"""verl's trainer does not compute columns that its rows already have, and its workers read only those that they use.

While the sampler's log-probabilities are the old ones (``bypass_mode``), verl's trainer reads them and writes them
under another name. Then it reads six columns and computes advantages, which credit assignment has already computed. The
GPUs wait for both. So the rows have these columns from the start (:func:`.transfer_queue.row_fields`).

verl's workers read all columns of a row, and a column costs 0.03 to 0.05 ms a row. Passes and updates use half of them,
and half of these follow from others (:func:`add_derived_columns`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from groundwire.train.config.verl_names import OWN_ESTIMATOR
from groundwire.train.verl.patching import patched

__all__ = ["add_derived_columns", "use_stored_columns"]

_COLUMNS = ("old_log_probs", "advantages", "returns")
"""Columns with a value per token: in verl's rows of padding they need the length of its reply."""
_READ = ("input_ids", "response_mask", "old_log_probs", "ref_log_prob", "rollout_is_weights", "advantages")
"""What a pass for log-probabilities or an update needs of a row, if the row has it."""
_DERIVED = ("prompts", "responses", "position_ids", "loss_mask")
"""What verl's engine also reads."""


def use_stored_columns(*, derive: bool) -> None:
    """verl's trainer in this process takes old log-probabilities and advantages from the rows from now on.

    ``derive``: the engine in its workers calls :func:`add_derived_columns`. A critic reads all columns.
    """
    import transfer_queue
    from verl.trainer.ppo import padding_utils
    from verl.trainer.ppo.utils import need_critic
    from verl.trainer.ppo.v1 import trainer_base

    trainer = trainer_base.PPOTrainer
    old_log_prob, advantage = trainer._compute_old_log_prob, trainer._compute_advantage
    padding_row = padding_utils.construct_minimal_padding_template

    def limit_columns(batch: Any, config: Any) -> None:
        if not need_critic(config):
            batch.fields = [*_READ, *(() if derive else _DERIVED)]

    def compute_old_log_prob(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        limit_columns(batch, self.config)
        return batch if _bypasses(self.config) else old_log_prob(self, batch, metrics)

    def compute_advantage(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's also measures how far sampler and trainer differ, so it runs after a pass for log-probabilities."""
        if self.config.algorithm.adv_estimator != OWN_ESTIMATOR:
            return advantage(self, batch, metrics)
        if _bypasses(self.config):
            return batch
        rows = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"]
        )
        advantages = rows["advantages"].to_padded_tensor(0.0)
        with patched(trainer_base, "compute_advantage_for_multi_trajectories", lambda _: _estimator_of(advantages)):
            batch = advantage(self, batch, metrics)
        limit_columns(batch, self.config)
        return batch

    def construct_minimal_padding_template(*arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A row of one token without a loss."""
        row, tag = padding_row(*arguments)
        row.update({name: torch.zeros(1) for name in _COLUMNS if name in row})
        return row, tag

    trainer._compute_old_log_prob, trainer._compute_advantage = compute_old_log_prob, compute_advantage
    padding_utils.construct_minimal_padding_template = construct_minimal_padding_template


def add_derived_columns(data: Any) -> None:
    """Add the columns that a worker did not read: each is jagged, int64 [rows, tokens] or [rows, reply's tokens]."""
    if "loss_mask" in data:
        return
    ids, mask = data["input_ids"], data["response_mask"]
    lengths, replies = ids.offsets().diff(), mask.offsets().diff()
    position = torch.arange(len(ids.values())) - ids.offsets()[:-1].repeat_interleave(lengths)
    of_reply = position >= (lengths - replies).repeat_interleave(lengths)
    data["prompts"] = _jagged(ids.values()[~of_reply], lengths - replies)
    data["responses"] = _jagged(ids.values()[of_reply], replies)
    data["position_ids"] = _jagged(position, lengths)
    data["loss_mask"] = mask


def _jagged(values: Tensor, lengths: Tensor) -> Tensor:
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _bypasses(config: Any) -> bool:
    """Whether the sampler's log-probabilities are the old ones in this step (:mod:`.old_logprobs`)."""
    correction = config.algorithm.get("rollout_correction")
    return bool(correction and correction.get("bypass_mode"))


def _estimator_of(advantages: Tensor) -> Any:
    """An estimator that returns ``advantages``, float32 [rows, tokens], without the tokens that verl has rejected."""

    def estimate(data: Any, **_: Any) -> Any:
        data.batch["advantages"] = data.batch["returns"] = advantages * data.batch["response_mask"]
        return data

    return estimate
