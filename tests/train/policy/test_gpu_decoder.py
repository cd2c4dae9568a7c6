"""The GPU's forward pass for sampling predicts what the CPU's does: tested where a GPU is."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import small_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from groundwire.train.policy.decoding.decoder import Decoder
from groundwire.train.policy.decoding.gpu_decoder import GPUDecoder
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.types import Sampling

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def steps(decoder: Decoder) -> Iterator[torch.Tensor]:
    """Logits of a prefill of two rows of 7 and 4 tokens behind 3 cached ones, and of two decode steps."""
    draw, device = random.Random(0), decoder.device
    ids = torch.tensor([[draw.randrange(339) for _ in range(9)] for _ in range(2)], device=device)
    cache = decoder.cache(4, 40)
    for first, width, last in ((0, 3, [2, 2]), (3, 4, [3, 0])):
        positions = torch.arange(first, first + width, device=device).expand(2, width).contiguous()
        last_step = torch.tensor(last, device=device)
        yield decoder.logits(
            ids[:, first : first + width], positions, last_step, cache, first_row=0, span=first + width
        )
    for step in range(2):
        positions = torch.tensor([[7 + step], [4 + step]], device=device)
        none = torch.zeros(2, dtype=torch.long, device=device)
        yield decoder.logits(ids[:, 7 + step :][:, :1], positions, none, cache, first_row=0, span=9)


@needs_gpu
@pytest.mark.parametrize(
    ("kind", "config"),
    [(LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config)],
)
def test_both_decoders_predict_the_same_in_both_types(kind: Any, config: Any) -> None:
    model = small_model(kind, config)
    made = [(Decoder, "cpu", False), (GPUDecoder, "cuda", False), (Decoder, "cpu", True), (GPUDecoder, "cuda", True)]
    with torch.inference_mode():
        expected, exact, *rounded = (
            [logits.cpu() for logits in steps(decoder(model.to(device), max_positions=40, bf16=bf16))]
            for decoder, device, bf16 in made
        )
    for step, (one, other, *near) in enumerate(zip(expected, exact, *rounded, strict=True)):
        assert torch.allclose(one, other, atol=1e-4), step
        assert all(each.dtype == torch.bfloat16 for each in near)
        assert all((one - each).abs().max() < 0.05 * one.abs().max() for each in near), step


def test_new_weights_are_copied_to_the_same_places() -> None:
    model = small_model(Qwen3ForCausalLM, Qwen3Config)
    decoder = GPUDecoder(model, max_positions=40, bf16=True)
    places = [weight.data_ptr() for layer in decoder.weights for weight in layer]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    decoder.refresh()
    assert places == [weight.data_ptr() for layer in decoder.weights for weight in layer]
    new = GPUDecoder(model, max_positions=40, bf16=True)
    for layer, expected in zip(decoder.weights, new.weights, strict=True):
        assert all(torch.equal(weight, other) for weight, other in zip(layer, expected, strict=True))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "count", "heads", "kv_heads", "width", "length"),
    [(3, 1, 9, 3, 64, 150), (2, 37, 6, 2, 64, 100), (2, 5, 4, 4, 48, 70), (4, 1, 8, 1, 128, 300)],
)
def test_the_kernel_attends_as_a_mask_does(
    rows: int, count: int, heads: int, kv_heads: int, width: int, length: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q = torch.randn(rows, count, heads, width, device="cuda", dtype=dtype)
    cache = torch.randn(2, rows + 2, kv_heads, length, width, device="cuda", dtype=dtype)
    positions = torch.randint(0, length - count, (rows, 1), device="cuda") + torch.arange(count, device="cuda")
    mask = Decoder.visible(positions, length, heads // kv_heads, dtype)
    difference = GPUDecoder.attend(q, cache, positions.contiguous()) - Decoder.attend(q, cache, mask)
    assert difference.abs().max() < (2e-5 if dtype == torch.float32 else 0.02)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "count", "heads", "kv_heads", "width", "normed"),
    [(3, 1, 9, 3, 64, False), (2, 5, 4, 2, 48, False), (2, 3, 4, 4, 128, True)],
)
def test_the_fused_kernels_compute_what_torch_does(
    rows: int, count: int, heads: int, kv_heads: int, width: int, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, change = torch.randn(2, rows * count, 2 * width)
    weight, rotary = torch.randn(2 * width), torch.randn(2, 40, width)
    qkv = torch.randn(rows, count, heads + 2 * kv_heads, width).to(dtype)
    positions = (torch.randint(0, 40 - count, (rows, 1)) + torch.arange(count)).contiguous()
    norms = torch.randn(2, width) if normed else torch.empty(0)
    results = []
    for device, kind in (("cpu", Decoder), ("cuda", GPUDecoder)):
        cache = torch.zeros(2, rows + 2, kv_heads, 40, width, device=device, dtype=dtype)
        given = [tensor.to(device) for tensor in (x, change.to(dtype), weight)]
        total, after = kind.add_and_normalize(*given, 1e-5, dtype)
        tables = [tensor.to(device) for tensor in (qkv, positions, rotary, norms)]
        queries = kind.rotate_and_store(*tables, 1e-5, cache)
        results.append([total, after, queries, cache, kind.gate(given[1])])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        difference = (one - other.cpu()).abs().max() / one.abs().max()
        assert difference < (1e-6 if dtype == torch.float32 else 0.008)  # two units of the last place
    assert results[1][3].any()


@needs_gpu
def test_a_gpu_samples_what_a_cpu_samples(tiny_policy: Any) -> None:
    model, tokenizer = tiny_policy
    draw = random.Random(1)
    prompts = [[draw.randrange(300) for _ in range(draw.randint(1, 60))] for _ in range(40)]
    replies = []
    for device in ("cpu", "cuda"):
        engine = LocalEngine(copy.deepcopy(model).to(device), tokenizer, max_model_len=256, max_batch=24, bf16=False)
        try:
            futures = [
                engine.submit(prompt, Sampling(temperature=1.0, max_tokens=30, seed=place))
                for place, prompt in enumerate(prompts)
            ]
            replies.append([future.result(120) for future in futures])
            engine.update_weights(1)
            again = engine.submit(prompts[0], Sampling(temperature=1.0, max_tokens=30, seed=0)).result(120)
            assert again.token_ids == replies[-1][0].token_ids
        finally:
            engine.close()
    for one, other in zip(*replies, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
