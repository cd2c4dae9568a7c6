"""The operations of a model's passes, and the speed of a step in the units of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from groundwire import domains
from groundwire.adapters.tracing import LLMCall
from groundwire.train.algorithms.speed import ModelCost, no_mfu, peak_flops, step_speed
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.run_reader import read_speed
from groundwire.train.local.packing import Row
from groundwire.train.local.trainer import LocalTrainer

SHAPE = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
# Of each layer: queries 64, keys and values 32 each (one head of two), output 64, and three products of 96.
WEIGHTS = 2 * (64 + 2 * 32 + 64 + 3 * 96)


def _llama(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM._from_config(LlamaConfig(**SHAPE, num_key_value_heads=1, **options))


class _Item:
    def __init__(self, prompt: int, reply: int) -> None:
        self.prompt_ids, self.response_ids = [1] * prompt, [2] * reply


@pytest.mark.parametrize("tied", [True, False])
def test_a_shared_prompt_costs_once_and_its_positions_are_attended_to_by_every_reply(tied: bool) -> None:
    cost = ModelCost.of(_llama(tie_word_embeddings=tied))
    assert (cost.weights, cost.output, cost.attention) == (WEIGHTS, 80, {None: 16})
    row = Row([1] * 5, [_Item(5, 2), _Item(6, 1)])
    assert (row.spans, row.length) == ([(0, 5), (5, 7), (5, 7)], 9)
    # The prompt attends to 1 + 2 + 3 + 4 + 5 positions, and each branch's two tokens to 6 + 7.
    forward = 2 * (9 * WEIGHTS + 3 * 80) + 2 * 4 * 8 * (15 + 13 + 13)
    assert cost.forward(row.spans, 3) == forward
    assert cost.update(row.spans, 3) == 3 * forward
    # Adapters: the backward pass has gradients of activations, none of weights.
    adapters = ModelCost.of(_llama(tie_word_embeddings=tied), frozen=True)
    assert adapters.update(row.spans, 3) == 3 * forward - 2 * (9 * WEIGHTS + 3 * 80)


def test_the_products_of_a_pass_are_those_that_torch_counts() -> None:
    model = _llama(attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, 7, dtype=torch.long)).logits.sum().backward()
    # Eager attention computes all 49 pairs, and the causal half of them are work of the model.
    pairs = 2 * 4 * 8 * 49
    products = ModelCost.of(model)
    causal = 2 * 4 * 8 * 28
    assert products.forward([(0, 7)], 7) - causal == 2 * 7 * (WEIGHTS + 80)
    assert counter.get_total_flops() == 3 * (products.forward([(0, 7)], 7) - causal + pairs)


def test_a_window_and_chosen_experts_bound_the_work() -> None:
    window = MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=3)
    cost = ModelCost.of(MistralForCausalLM(window))
    assert cost.forward([(0, 5)], 0) == 2 * 5 * WEIGHTS + 2 * 4 * 8 * (1 + 2 + 3 + 3 + 3)
    assert cost.forward([(2, 5)], 0) == 2 * 3 * WEIGHTS + 2 * 4 * 8 * (3 + 3 + 3)
    experts = MixtralConfig(**SHAPE, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2)
    router = 2 * 4 * 8
    assert ModelCost.of(MixtralForCausalLM(experts)).weights == WEIGHTS + 2 * 3 * 96 + router


def test_the_sampler_computes_what_is_not_in_its_cache_but_a_last_token() -> None:
    cost = ModelCost.of(_llama())
    call = LLMCall(rollout_id="", attempt_id="", sequence=1, prompt_ids=[1] * 4, response_ids=[2, 3])
    cached = LLMCall(rollout_id="", attempt_id="", sequence=1, prompt_ids=[1] * 4, response_ids=[2], cached_tokens=4)
    failed = LLMCall(rollout_id="", attempt_id="", sequence=1, prompt_ids=[1] * 4)
    assert cost.sampling([call, cached, failed]) == cost.forward([(0, 5)], 2) + cost.forward([], 1)


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA B200", 2250),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0),  # a part of a card
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("NVIDIA X900", 0),
        ("CPU", 0),
    ],
)
def test_a_card_has_the_peak_of_its_data_sheet_or_none(device: str, tera: float) -> None:
    assert peak_flops(device) == tera * 1e12


def test_a_step_has_the_units_of_others() -> None:
    seconds = {"sampling": 2.0, "update": 4.0, "agent": 1.0, "waiting": 1.0}
    machine = {"device": "NVIDIA H100 80GB HBM3", "gpus": 2, "training_gpus": 1, "cores": 4}
    flops = {"sampling": 989e12, "update": 3 * 989e12}
    line = {"rollouts": 64, "seconds": seconds, "flops": flops, "machine": machine}
    speed = step_speed(line, tokens=16000, step_s=8.0, update_s=4.0)
    assert speed == {
        "tokens_per_s_per_gpu": 1000.0,
        "rollouts_per_s_per_core": 2.0,
        "update_mfu": 0.75,
        "step_mfu": 0.25,
        "gpu_idle_fraction": 0.25,
    }
    assert not no_mfu({**line, "speed": speed})
    other = {**line, "machine": {**machine, "device": "NVIDIA X900"}}
    speed = step_speed(other, tokens=16000, step_s=8.0, update_s=4.0)
    assert speed.keys() == {"tokens_per_s_per_gpu", "rollouts_per_s_per_core", "gpu_idle_fraction"}
    assert "has no peak of NVIDIA X900" in no_mfu({**other, "speed": speed})


class _CountedPasses(LocalTrainer):
    """Looks at what the model gets in an update."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: dict[int, list[tuple[int, int]]] = {}
        self.model.base_model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _module: Any, _arguments: Any, given: dict[str, Any]) -> None:
        if given.get("use_cache") is False and self.timer.current() == "update":
            positions = given["position_ids"]
            real = (positions > 0) | (torch.arange(positions.shape[1]) == 0)  # columns of padding have position 0
            counted = int(real.sum()), int((positions[real] + 1).sum())
            self.seen.setdefault(self.grpo.steps, []).append(counted)


def test_the_counts_of_a_run_are_those_of_the_passes_that_its_model_saw(tmp_path: Path) -> None:
    config = resolve("fast", steps=2, tasks_per_step=6, group_size=4, val_tasks=2, temperature=1.2, device="cpu")
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config.to_dict())
    trainer = _CountedPasses(job_of(config, domains.get("spider")), run=run, callback=ProgressCallback())
    trainer.train()
    lines = [line for line in run.metrics() if line["step"]]
    assert trainer.seen
    cost = trainer.grpo.cost
    for line in lines:
        seen = trainer.seen.get(line["step"], [])
        assert line.get("tokens_computed", 0) == sum(tokens for tokens, _ in seen)
        attended = 4 * cost.attention[None] * sum(pairs for _, pairs in seen)
        products = 2 * (cost.weights * line.get("tokens_computed", 0) + cost.output * line.get("tokens_trained", 0))
        assert line["flops"]["update"] == 3 * (products + attended)
        rollouts = [
            rollout for rollout in run.rollouts()[0] if rollout.step == line["step"] and rollout.mode == "train"
        ]
        assert line["flops"]["sampling"] == cost.sampling(call for rollout in rollouts for call in rollout.calls) > 0
        step_s = sum(line["seconds"].values())
        assert line["speed"]["rollouts_per_s_per_core"] == pytest.approx(
            24 / step_s / line["machine"]["cores"], rel=0.01
        )
        assert line["machine"]["device"] == "CPU"
    speed = read_speed(run)
    assert speed is not None
    assert speed["no_mfu"] == "no MFU: train/algorithms/speed.py has no peak of CPU"
    sequences = [line["speed"]["tokens_per_s_per_machine"] * sum(line["seconds"].values()) for line in lines]
    total_s = sum(sum(line["seconds"].values()) for line in lines)
    assert speed["tokens_per_s_per_machine"] == pytest.approx(sum(sequences) / total_s, rel=1e-3)
