"""The memory of a run on a GPU is known before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import small_causal_lm
from transformers import LlamaConfig

from groundwire.train.algorithms.model_size import MemoryPlan
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.local.memory_plan import check_host, plan_for_model, plan_run
from groundwire.train.policy.pretrained.model_files import save_policy

SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3,
)  # fmt: skip


def plan(available_gb: float = 80, **given: Any) -> MemoryPlan:
    config = RunConfig(
        device="cuda",
        precision="bf16",
        kl_coef=given.pop("kl_coef", 0.0),
        n_runners=given.pop("n_runners", 128),
    )
    shape = {"max_model_len": 3072, "parameters": 134_515_008, "adapters": given.pop("trained", 0), **given}
    return plan_for_model(config, SMOLLM2, available=int(available_gb * 1e9), **shape)


def test_static_memory_follows_from_the_number_of_parameters() -> None:
    small, large = plan(), plan(parameters=269_030_016)
    for part in ("weights", "gradients", "optimizer", "sampler"):
        assert large.parts[part] == 2 * small.parts[part]
    assert small.parts["optimizer"] == 8 * 134_515_008
    per_token = 2 * 2 * 30 * 3 * 64  # keys and values, bfloat16
    assert small.parts["cache"] == per_token * (128 * 3072 + 131072)
    growing = plan(4000, n_runners=8192)
    of_a_pass = growing.parts["activations"] + growing.parts["logits"]
    assert growing.parts["cache"] == per_token * (1.5 * 8192 * 3072 + 131072) - of_a_pass


def test_adapters_have_gradients_and_moments_and_need_no_copy_as_reference() -> None:
    whole, adapters = plan(kl_coef=0.1), plan(kl_coef=0.1, trained=1_000_000)
    assert (adapters.parts["gradients"], adapters.parts["optimizer"]) == (4_000_000, 8_000_000)
    assert whole.parts["weights"] == 2 * adapters.parts["weights"] == 2 * plan().parts["weights"]


def test_a_pass_has_as_many_tokens_as_fit() -> None:
    assert plan(40).tokens > plan(26).tokens > 3072
    assert plan(80).tokens <= 65536


def refusal(available_gb: float, **given: Any) -> str:
    with pytest.raises(ConfigError, match=r"the run needs .* GB .*; the GPU has .* GB") as raised:
        plan(available_gb, **given)
    return str(raised.value).rpartition(": ")[2]


def test_a_gpu_that_is_too_small_is_refused_with_what_would_help() -> None:
    larger = "take a larger GPU or a smaller model"
    shown = refusal(24, max_model_len=8192)
    assert shown == f"lower n_runners (128) or lower max_model_len (8192), or {larger}"
    assert refusal(24, max_model_len=1024, n_runners=1024) == f"lower n_runners (1024), or {larger}"
    assert refusal(12, parameters=500_000_000) == f"set lora_rank=16 and lower n_runners (128), or {larger}"


def test_states_that_are_larger_than_the_gpu_need_another_gpu_or_lora() -> None:
    larger = "take a larger GPU or a smaller model"
    with pytest.raises(
        ConfigError, match=r"; weights, gradients and moments alone need 22\.0 GB: set lora_rank=16, or"
    ):
        plan(20, parameters=1_000_000_000, n_runners=1)
    assert refusal(20, parameters=1_000_000_000, n_runners=1) == f"set lora_rank=16, or {larger}"
    assert refusal(20, parameters=7_000_000_000) == larger
    assert refusal(2, trained=1_000_000, parameters=1_000_000_000) == larger


def test_a_model_that_is_larger_than_the_machine_is_refused_before_it_is_read() -> None:
    config, parameters = RunConfig(model="starter"), 1_148_416
    check_host(config, 20 * parameters)
    with pytest.raises(ConfigError, match=r"needs 0\.0 GB for .* parameters, .*: set lora_rank=16, or take a larger"):
        check_host(config, 20 * parameters - 1)
    check_host(config.model_copy(update={"lora_rank": 2}), 9 * parameters)


@pytest.mark.parametrize("kind", ["gpt_oss", "lfm2", "mamba"])
def test_the_sampler_of_other_architectures_is_one_copy(tiny_policy: Any, tmp_path: Path, kind: str) -> None:
    model = small_causal_lm(kind, vocab_size=339)
    save_policy(model, tiny_policy[1], tmp_path)
    parts = plan_run(RunConfig(model=str(tmp_path), device="cuda", precision="bf16"), 10**12).parts
    assert parts["sampler"] == 2 * model.num_parameters()
    assert all(parts.values())
