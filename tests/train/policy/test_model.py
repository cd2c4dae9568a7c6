"""Large models use all cores and, where the processor has instructions for it, bfloat16; the starter does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from groundwire.train.config.run_config import RunConfig
from groundwire.train.local.memory_plan import settings_for_model
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import bf16_is_faster, sampling_threads
from groundwire.train.policy.types import Sampling


def model_of(parameters, device="cpu"):
    return SimpleNamespace(device=torch.device(device), num_parameters=lambda: parameters)


SMALL, LARGE = model_of(1_100_000), model_of(135_000_000)


def processor(monkeypatch, **capabilities):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)


@pytest.mark.parametrize("instructions", ["avx512_bf16", "amx_bf16"])
def test_a_large_model_is_computed_in_bfloat16_where_the_processor_can(monkeypatch, instructions):
    processor(monkeypatch, **{instructions: True})
    assert bf16_is_faster(LARGE)
    assert not bf16_is_faster(SMALL)
    processor(monkeypatch, avx512_f=True, **{instructions: False})
    assert not bf16_is_faster(LARGE)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not bf16_is_faster(LARGE)


def test_other_devices():
    assert bf16_is_faster(model_of(1000, "cuda"))
    assert not bf16_is_faster(model_of(135_000_000, "mps"))


def test_a_large_model_is_sampled_with_all_threads(monkeypatch):
    monkeypatch.setattr("groundwire.train.policy.model.processors", lambda: 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (sampling_threads(SMALL), sampling_threads(LARGE)) == (1, 2)
        assert sampling_threads(model_of(135_000_000, "cuda")) == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("precision", "expected"), [("auto", True), ("fp32", False), ("bf16", True)])
def test_the_setting_decides_over_the_processor(monkeypatch, precision, expected):
    processor(monkeypatch, avx512_bf16=True)
    assert settings_for_model(RunConfig(precision=precision), LARGE, 512).bf16 is expected


def test_sampler_and_trainer_agree_in_bfloat16(tiny_policy):
    model = LlamaForCausalLM._from_config(
        LlamaConfig(
            vocab_size=len(tiny_policy[1]),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ).eval()
    engine = LocalEngine(model, tiny_policy[1], max_model_len=128, bf16=True)
    try:
        replies = [engine.submit([3, 5, 7 + i], Sampling(max_tokens=20, seed=i)) for i in range(8)]
        for reply in (each.result(60) for each in replies):
            ids = torch.tensor([[*reply.prompt_ids, *reply.token_ids]])
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                logits = model(ids).logits[0, 2:-1].float()
            expected = torch.log_softmax(logits, -1).gather(1, ids[0, 3:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(reply.logprobs), expected, atol=0.03, rtol=0)
    finally:
        engine.close()
