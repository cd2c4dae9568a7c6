"""The program of each of two processes: verl's worker computes what the local trainer computes for constrained replies.

FSDP divides the model between both, and each has other rows: replies to a JSON schema, to a required tool, free ones,
and trajectories with several of these. It does so in each of the :data:`WAYS` in which verl's worker may compute.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from constrained import GRAMMARS, byte_level_tokenizer, call_of
from dev.pretrain.model import new_policy
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from training_groups import Sampled, training_groups
from transformers import LlamaForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils, ulysses
from verl.utils.distributed import initialize_global_process_group
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from groundwire.train.local.grpo import GRPO, GRPOConfig
from groundwire.train.local.packing import Row, WeightedItem
from groundwire.train.policy.attention import VARLEN
from groundwire.train.policy.constraint import Constraints
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.types import Sampling
from groundwire.train.verl.rows import row_fields, training_rows
from groundwire.train.verl.shared_prefixes.engine import SharedPrefixesEngine, _Constrained

TEMPERATURE = 0.7
WAYS = {
    "shared prefixes": {},
    "shared prefixes, FSDP 1": {"strategy": "fsdp"},
    "packed rows": {"shares": False},
    "packed rows, logits": {"fused": False},
    "padded rows": {"attention": "sdpa"},
    "padded rows, logits": {"attention": "sdpa", "fused": False},
}


def main() -> None:
    initialize_global_process_group()
    rank, tokenizer = distributed.get_rank(), byte_level_tokenizer()
    model = new_policy(tokenizer, width=32, layers=2, heads=2, intermediate=64, context=512, seed=1)
    groups = sampled(model, tokenizer, rank)
    rows = [row for group in groups for row in training_rows(group, range(2), 1, None, own_advantages=True)]
    expected = by_the_local_trainer(model, tokenizer, [item for group in groups for item in group.items])
    for way, options in WAYS.items():
        # verl replaces the method of all models of the class.
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(LlamaForCausalLM, "forward", LlamaForCausalLM.forward)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            compared(way, worker(Path(folder), **options), rows, *expected)
    parts_of_a_row_are_constrained_as_the_whole(rank)
    distributed.destroy_process_group()


def by_the_local_trainer(model: Any, tokenizer: Any, items: list[Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The figures of the trained tokens, and the gradients of :func:`loss`, the mean of both processes."""
    assert {len(item.constrained) for item in items} == {0, 1, 2}
    grpo = GRPO(model, GRPOConfig(temperature=TEMPERATURE, entropy_coef=0.1), constraints=Constraints(model, tokenizer))
    weighted = [WeightedItem(**vars(item), weight=0.0, penalty=0.0) for item in items]
    tokens = grpo._evaluate([Row(item.trajectory.prompt_ids, [item]) for item in weighted])
    assert (tokens.logprobs - tokens.old).abs().max() < 1e-5  # what was sampled
    numbers = torch.cat([torch.arange(1, len(item.mask) + 1)[torch.tensor(item.mask) == 1] for item in items])
    (numbers * (tokens.logprobs + 0.1 * tokens.entropy)).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        distributed.all_reduce(parameter.grad)
        gradients[name] = parameter.grad / distributed.get_world_size()
    return tokens, gradients


def compared(way: str, engine: Any, rows: list[Any], tokens: Any, gradients: dict[str, torch.Tensor]) -> None:
    def data() -> Any:
        made = tensordict_utils.list_of_dict_to_tensordict([row_fields(row, "spider") for row in rows])
        config = engine.model_config
        tensordict_utils.assign_non_tensor(
            made, use_remove_padding=config.use_remove_padding, use_fused_kernels=config.use_fused_kernels,
            use_dynamic_bsz=True, max_token_len_per_gpu=400, temperature=TEMPERATURE, calculate_entropy=True,
            return_model_output=True,
        )  # fmt: skip
        return made

    def of_trained(output: Any, name: str) -> torch.Tensor:
        pairs = zip(output["model_output"][name].unbind(), rows, strict=True)
        return torch.cat([values[-1 - len(row.mask) : -1][torch.tensor(row.mask) == 1] for values, row in pairs])

    with engine.eval_mode():
        inferred = engine.forward_backward_batch(data(), None, forward_only=True)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        trained = engine.forward_backward_batch(data(), loss)
        found = gradients_of(engine)
    for output in (inferred, trained):
        for name, expected in (("log_probs", tokens.logprobs), ("entropy", tokens.entropy)):
            torch.testing.assert_close(of_trained(output, name), expected, atol=1e-6, rtol=1e-6, msg=way)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() < 1e-6 * gradient.abs().max(), (way, name)


def sampled(model: Any, tokenizer: Any, rank: int) -> list[Any]:
    """What an update trains of replies of ``model``: two groups of each kind."""
    engine, rollouts = LocalEngine(model, tokenizer, max_model_len=400), []
    kinds = {"schema": ["schema"], "tool": ["calls"], "free": [""], "mixed": ["", "schema", "calls", ""]}
    for number in range(16):
        kind = [*kinds][number // 2 % 4]
        prompt, calls = [5, 6, 7, rank, number % 4], []
        for sequence, name in enumerate(kinds[kind]):
            options = {"seed": 2 * number + rank, "temperature": TEMPERATURE, "max_tokens": 40 if name else 5}
            grammar = GRAMMARS.get(name, "")
            reply = engine.submit(prompt, Sampling(grammar=grammar, **options)).result(60)
            calls.append(call_of(reply, grammar, sequence))
            prompt = [*prompt, *reply.token_ids, 9]
        rollouts.append(Sampled(f"{kind}{number // 8}", float(number % 2), calls))
    engine.close()
    return training_groups(rollouts)


def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Each trained token weighs as much as its place in the reply."""
    parts = []
    for name, factor in (("log_probs", 1.0), ("entropy", 0.1)):
        for row, mask in zip(model_output[name].unbind(), data["loss_mask"].unbind(), strict=True):
            parts.append(factor * (row[-1 - len(mask) : -1] * mask * torch.arange(1, len(mask) + 1)).sum())
    return sum(parts), {}


def worker(
    folder: Path, strategy: str = "fsdp2", attention: str = VARLEN, fused: bool = True, shares: bool = True
) -> SharedPrefixesEngine:
    engine = SharedPrefixesEngine(
        model_config=HFModelConfig(
            path=str(folder),
            use_fused_kernels=fused,
            use_remove_padding=attention == VARLEN,
            fused_kernel_options={"impl_backend": "torch"},
            override_config={"attn_implementation": attention, "model_config": {}},
            external_lib="groundwire.train.verl.shared_prefixes.engine",
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy, mixed_precision={"param_dtype": "fp32"}, use_torch_compile=False, use_orig_params=True
        ),
        optimizer_config=FSDPOptimizerConfig(total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    if not shares:
        engine._shares = lambda data: False
    return engine


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    if isinstance(engine.module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(engine.module, with_grads=True):
            named = engine.module.named_parameters()
            return {name.replace("_fsdp_wrapped_module.", ""): each.grad.clone() for name, each in named}
    return {name: each.grad.full_tensor() for name, each in engine.module.named_parameters()}


def parts_of_a_row_are_constrained_as_the_whole(rank: int) -> None:
    """With sequence parallelism a process has a part of each row, and verl says which."""
    ulysses.set_ulysses_sequence_parallel_group(distributed.group.WORLD)
    ids, places = torch.arange(100, 113)[None], torch.tensor([1, 2, 6, 7, 11])
    batch = {"input_ids": torch.nested.as_nested_tensor([ids[0, :5], ids[0, 5:]], layout=torch.jagged)}
    part, _, _ = ulysses.ulysses_pad_and_slice_inputs(ids, sp_size=2)
    engine = SimpleNamespace(use_ulysses_sp=True, ulysses_sequence_parallel_size=2)
    found = SharedPrefixesEngine._placed(engine, _Constrained(places, places[:, None]), batch, part)
    expected = places[(places >= 7 * rank) & (places < 7 * (rank + 1))]
    assert torch.equal(part[0, found.places], ids[0, expected])
    assert torch.equal(found.masks, expected[:, None])


main()
