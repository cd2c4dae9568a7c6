"""The program of each of two processes: gradients of shared prompts are those of verl's engine, with FSDP over both.

The processes have other rows, and in other numbers of micro-batches; one has no row with a gradient at times.
"""

from __future__ import annotations

import tempfile
from functools import partial

import torch
from test_shared_prompts import local, make_engines, ppo_batch, some_rows
from verl.utils import tensordict_utils
from verl.utils.distributed import initialize_global_process_group
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss


def main() -> None:
    initialize_global_process_group()
    rank = torch.distributed.get_rank()
    for strategy in ("fsdp2", "fsdp"):
        config = FSDPActorConfig(strategy=strategy, rollout_n=4, ppo_micro_batch_size_per_gpu=1)
        with tempfile.TemporaryDirectory() as folder:
            both = make_engines(folder, strategy)
        for zeros in ("none", "of one process", "all"):
            has_gradient = zeros == "none" or (zeros == "of one process" and rank == 0)
            gradients, passes = {}, {}
            for name, engine in vars(both).items():
                data = rows_of(rank, has_gradient)
                counted = passes.setdefault(name, [])
                hook = engine.module.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
                with engine.train_mode():
                    engine.optimizer_zero_grad()
                    engine.forward_backward_batch(data, partial(ppo_loss, config=config))
                    gradients[name] = [local(each.grad).clone() for each in engine.module.parameters()]
                hook.remove()
            for got, wanted in zip(gradients["ours"], gradients["verl"], strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)
            found = torch.tensor(float(any(torch.count_nonzero(each) for each in gradients["ours"])))
            torch.distributed.all_reduce(found)
            assert (found > 0) == (zeros != "all"), zeros
            if zeros == "all":
                assert len(passes["ours"]) == 1 < len(passes["verl"])
    torch.distributed.destroy_process_group()


def rows_of(rank: int, has_gradient: bool) -> object:
    prompts, replies = some_rows(rank, groups=4 + 5 * rank)
    replies = [reply if len(reply) else torch.tensor([7]) for reply in replies]
    rows = [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]
    advantages = [(0.5 - number % 2) * has_gradient for number in range(len(rows))]
    data = ppo_batch(rows, replies, advantages)
    everywhere = torch.tensor(len(rows))
    torch.distributed.all_reduce(everywhere)
    tensordict_utils.assign_non_tensor(data, global_batch_size=int(everywhere))
    return data


main()
