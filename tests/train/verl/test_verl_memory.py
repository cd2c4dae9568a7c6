"""The memory of a run with verl is known before it starts, and its micro-batches have as many tokens as fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dev.gpu.random_model import llama_config

from groundwire.train.algorithms.model_size import MemoryPlan
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.config.resolve import resolve
from groundwire.train.verl.hydra_config import flat_config
from groundwire.train.verl.memory_plan import plan_run

RECOMPUTED = "actor_rollout_ref.model.enable_gradient_checkpointing=True"
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
OFFLOAD = "actor_rollout_ref.actor.fsdp_config"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The configurations of models without weights."""
    folders = {shape: tmp_path_factory.mktemp(shape.replace(".", "-")) for shape in ("0.5b", "1.5b")}
    for shape, folder in folders.items():
        llama_config(shape, vocab_size=49152, bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(folder)
    return {shape: str(folder) for shape, folder in folders.items()}


def plan(model: str, gigabytes: float, *settings: str, **given: object) -> MemoryPlan | None:
    config = resolve(
        "starter", trainer="verl", model=model, max_model_len=3072, verl=parse_overrides(settings), **given
    )
    return plan_run(config, flat_config(config), int(gigabytes * 1e9))


def planned(model: str, gigabytes: float, *settings: str, **given: object) -> MemoryPlan:
    made = plan(model, gigabytes, *settings, **given)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("shape", "tokens", "settings", "measured_gib"),
    [
        ("0.5b", 16384, [], 27.84),
        ("0.5b", 32768, [], 51.16),
        ("1.5b", 16384, [RECOMPUTED], 25.87),
        ("1.5b", 32768, [RECOMPUTED], 28.3),
    ],
)
def test_predictions_are_a_little_above_the_peaks_in_docs_results(
    models: dict[str, str], shape: str, tokens: int, settings: list[str], measured_gib: float
) -> None:
    made = planned(models[shape], 150, f"{TOKENS}={tokens}", *settings)
    assert made.tokens == tokens
    assert 1 <= made.update / (measured_gib * 2**30) < 1.15


def test_a_micro_batch_has_as_many_tokens_as_fit(models: dict[str, str]) -> None:
    tokens = [planned(models["0.5b"], gigabytes).tokens for gigabytes in (24, 40, 80, 141)]
    assert tokens == [8192, 16384, 32768, 32768]
    assert planned(models["1.5b"], 40).tokens == 3072  # one row
    assert planned(models["1.5b"], 40, RECOMPUTED).tokens == 32768


def test_sharding_adapters_and_offload_need_less(models: dict[str, str]) -> None:
    model = models["1.5b"]
    whole = planned(model, 141)
    assert planned(model, 141, "trainer.n_gpus_per_node=8").states == pytest.approx(whole.states / 8, rel=0.01)
    groups_of_two = planned(model, 141, "trainer.n_gpus_per_node=8", f"{OFFLOAD}.fsdp_size=2")
    assert groups_of_two.states == pytest.approx(whole.states / 2, rel=0.01)
    assert planned(model, 141, lora_rank=32).states < 0.4 * whole.states
    assert planned(model, 141, kl_coef=0.1).states > whole.states
    kept = whole.sampling - int(0.4 * 141e9)
    offloaded = planned(model, 141, f"{OFFLOAD}.optimizer_offload=True")
    assert offloaded.sampling == pytest.approx(whole.sampling - 2 / 3 * kept, rel=0.01)
    both = planned(model, 141, f"{OFFLOAD}.optimizer_offload=True", f"{OFFLOAD}.param_offload=True")
    assert both.sampling == int(0.4 * 141e9)
    assert planned(model, 141, "trainer.v1.trainer_mode=separate_async").sampling == 0


def refusal(*given: Any, **settings: object) -> str:
    with pytest.raises(ConfigError, match=r"the run needs .* GB for an update .*; the GPU has .* GB") as raised:
        plan(*given, **settings)
    return str(raised.value).rpartition(" GB: ")[2]


def test_a_gpu_that_is_too_small_is_refused_with_what_would_help(models: dict[str, str]) -> None:
    larger = "take a larger GPU or a smaller model"
    utilization = "actor_rollout_ref.rollout.gpu_memory_utilization"
    shown = refusal(models["1.5b"], 37, RECOMPUTED.replace("True", "False"))
    assert shown == (
        "set lora_rank=16 or add GPUs (trainer.n_gpus_per_node) or lower max_model_len (3072) or "
        f"set {RECOMPUTED}, or {larger}"
    )
    shown = refusal(models["1.5b"], 40, RECOMPUTED, f"{utilization}=0.7")
    assert shown == (
        f"lower {utilization} (0.7) or set {OFFLOAD}.optimizer_offload=True and {OFFLOAD}.param_offload=True, "
        f"or {larger}"
    )
    offloaded = [f"{OFFLOAD}.{part}_offload=True" for part in ("optimizer", "param")]
    assert refusal(models["1.5b"], 40, RECOMPUTED, f"{utilization}=1.1", *offloaded) == (
        f"lower {utilization} (1.1), or {larger}"
    )
    with pytest.raises(ConfigError, match="32,768 tokens a pass"):  # a given value is not changed
        plan(models["0.5b"], 24, f"{TOKENS}=32768")
    assert f"lower {TOKENS} (32768)" in refusal(models["0.5b"], 24, f"{TOKENS}=32768")


def test_states_that_are_larger_than_the_gpu_need_more_gpus_or_lora(models: dict[str, str]) -> None:
    larger = "take a larger GPU or a smaller model"
    with pytest.raises(ConfigError, match=r"; weights, gradients and moments alone need 27\.\d GB: set lora"):
        plan(models["1.5b"], 24, RECOMPUTED)
    shown = refusal(models["1.5b"], 24, RECOMPUTED)
    assert shown == f"set lora_rank=16 or add GPUs (trainer.n_gpus_per_node), or {larger}"
    assert refusal(models["1.5b"], 4, RECOMPUTED, lora_rank=16) == f"add GPUs (trainer.n_gpus_per_node), or {larger}"
    assert refusal(models["1.5b"], 0.1, RECOMPUTED) == larger


def test_a_model_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"no model in missing\.gguf: there is no such file or folder"):
        plan("missing.gguf", 80)
    with pytest.raises(ConfigError, match="no model no/such-model: no such folder, and it is not in the hub's cache"):
        plan("no/such-model", 80)


def test_what_cannot_be_planned_has_no_plan(models: dict[str, str], tmp_path: Path) -> None:
    assert plan(models["0.5b"], 80, "actor_rollout_ref.model.use_remove_padding=False") is None
    assert plan(models["0.5b"], 80, "model_engine=megatron") is None
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    assert plan(str(tmp_path), 80) is None
