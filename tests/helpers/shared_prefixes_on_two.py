"""The program of each of two processes: with shared prefixes verl's actor learns what it learns with its own engine.

FSDP divides the model between both. The processes have other rows, in other numbers of micro-batches, and at times one
of them has no row with a gradient.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_prefix_engine import engine_settings, nested, some_rows
from verl.utils import tensordict_utils
from verl.utils.distributed import initialize_global_process_group
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, TrainingWorkerConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from groundwire.train.config.verl_names import ENGINE_VENDOR
from groundwire.train.verl.rows import TrainingRow, row_fields
from groundwire.train.verl.shared_prefixes.engine import SharedPrefixesEngine

ROWS = 24
"""Of each process, in two mini-batches."""
WITHOUT_GRADIENT = {
    "no row": lambda number, rank: False,
    "two of three rows": lambda number, rank: number % 3 > 0,
    "the rows of one process": lambda number, rank: rank == 1,
    "all rows": lambda number, rank: True,
}


def main() -> None:
    initialize_global_process_group()
    for strategy in ("fsdp2", "fsdp"):
        for name in WITHOUT_GRADIENT:
            ours, verls = (learned(strategy, name, vendor) for vendor in (ENGINE_VENDOR, "nvidia"))
            for metric in ("loss", "grad_norm"):
                assert ours[metric] == pytest.approx(verls[metric], rel=1e-4, abs=1e-7), (strategy, name, metric)
            assert any(ours["grad_norm"]) == (name != "all rows")
    weights_are_those_that_verl_sends()
    torch.distributed.destroy_process_group()


def weights_are_those_that_verl_sends() -> None:
    """With FSDP 1, before the first pass and after an update."""
    worker = worker_of("fsdp", ENGINE_VENDOR)
    engine, verls = worker.engine, FSDPEngineWithLMHead.get_per_tensor_param
    before = {name: weight.clone() for name, weight in engine.get_per_tensor_param()[0]}
    for pass_of_verl in range(2):
        weights, config = engine.get_per_tensor_param()
        assert config is None
        ours = {name: weight.clone() for name, weight in weights}
        theirs = dict(verls(engine)[0])
        assert set(ours) == set(theirs)
        for name, weight in theirs.items():
            assert torch.equal(ours[name], weight), name
            assert ours[name].dtype == weight.dtype, name
            assert torch.equal(ours[name], before[name]) == (pass_of_verl == 0), name
        worker.train_mini_batch(batch(torch.distributed.get_rank(), "no row"))


def learned(strategy: str, without_gradient: str, vendor: str) -> dict[str, list[float]]:
    """The metrics of both mini-batches; the second has the weights after the first."""
    data = batch(torch.distributed.get_rank(), without_gradient)
    if vendor == ENGINE_VENDOR:
        for name in ("prompts", "responses", "position_ids", "loss_mask"):  # it derives them
            del data[name]
    output = worker_of(strategy, vendor).train_mini_batch(data)
    metrics: dict[str, list[float]] = tensordict_utils.get(output, "metrics")
    return metrics


def worker_of(strategy: str, vendor: str) -> Any:
    """verl's worker with an actor."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("VERL_ENGINE_VENDOR", vendor)
        settings = engine_settings(Path(folder), strategy)
        settings["optimizer_config"] = FSDPOptimizerConfig(total_training_steps=2, lr=1e-3, weight_decay=0.0)
        worker = TrainingWorker(config=TrainingWorkerConfig(model_type="language_model", **settings))
        worker.reset()
    assert isinstance(worker.engine, SharedPrefixesEngine) == (vendor == ENGINE_VENDOR)
    config = FSDPActorConfig(
        strategy=strategy, rollout_n=4, ppo_mini_batch_size=6, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True
    )
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker


def batch(rank: int, without_gradient: str) -> Any:
    """What the actor reads of verl's queue for an update."""
    prompts, replies = some_rows(rank, groups=ROWS)
    rows = []
    for number, (prompt, reply) in enumerate(zip(prompts[:ROWS], replies, strict=False)):
        ids = reply.tolist() or [7]
        advantage = 0.0 if WITHOUT_GRADIENT[without_gradient](number, rank) else 0.5 - number % 2
        rows.append(
            TrainingRow(
                uid="uid", session=number, prompt_ids=prompt.tolist(), response_ids=ids,
                mask=[1] * len(ids), advantages=[advantage] * len(ids), logprobs=[-4.0] * len(ids), reward=1.0, turns=1,
                first_version=0, last_version=0, step=1,
            )
        )  # fmt: skip
    data = tensordict_utils.list_of_dict_to_tensordict([row_fields(row, "spider") for row in rows])
    data["old_log_probs"] = data["rollout_log_probs"]
    data["advantages"] = nested(torch.tensor(row.advantages) for row in rows)
    tensordict_utils.assign_non_tensor(
        data, use_remove_padding=True, use_fused_kernels=True, use_dynamic_bsz=True, max_token_len_per_gpu=100,
        temperature=0.7, calculate_entropy=False, global_batch_size=ROWS, mini_batch_size=ROWS, epochs=1, seed=1,
        dataloader_kwargs={"shuffle": True},
    )  # fmt: skip
    return data


main()
