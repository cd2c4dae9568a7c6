"""Models that our own decoder does not know are sampled by transformers' forward pass, and trained."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, small_causal_lm
from training_groups import Sampled, llm_call, training_groups

from groundwire.train.local.grpo import GRPO, GRPOConfig
from groundwire.train.local.lora import add_adapters, merged_weights
from groundwire.train.policy import engine as engine_module
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.types import Completion, Sampling

PROMPTS = [[5, 6, 7], [8, 9, 10], [*range(20, 41)], [5, 6, 7], [30, 31, 32, 33, 34]]


def sample(engine: LocalEngine, prompts: list[list[int]], **sampling: Any) -> list[Completion]:
    futures = [
        engine.submit(prompt, Sampling(**{"seed": number, "max_tokens": 6 + 3 * number, **sampling}))
        for number, prompt in enumerate(prompts)
    ]
    return [future.result(60) for future in futures]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_ids_and_log_probabilities_are_those_of_our_own_decoder(
    tiny_policy: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, tokenizer = small_causal_lm(kind, vocab_size=339), tiny_policy[1]
    draw = random.Random(0)
    prompts = [[draw.randrange(339) for _ in range(draw.randint(1, 30))] for _ in range(6)] * 2
    replies = []
    for ours in (True, False):
        monkeypatch.setattr(engine_module, "computes", lambda _config, ours=ours: ours)
        with closing(LocalEngine(model, tokenizer, max_model_len=64)) as engine:
            replies.append([*sample(engine, prompts, top_p=0.9), *sample(engine, prompts[:3], temperature=0.0)])
    for ours, theirs in zip(*replies, strict=True):
        assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_update_computes_the_log_probabilities_of_the_sampler(tiny_policy: Any, kind: str) -> None:
    model, tokenizer = small_causal_lm(kind, vocab_size=339), tiny_policy[1]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with closing(LocalEngine(model, tokenizer, max_model_len=96)) as engine:
        grpo = GRPO(model, GRPOConfig(minibatches=1, learning_rate=1e-3))
        for step in range(2):
            replies = sample(engine, PROMPTS)
            rollouts = [
                Sampled("g", float(number % 2), [
                    llm_call(0, list(reply.prompt_ids), reply.token_ids, logprobs=reply.logprobs)
                ])
                for number, reply in enumerate(replies)
            ]  # fmt: skip
            metrics = grpo.update(training_groups(rollouts))
            assert metrics["initial_ratio_error"] < 1e-4
            assert metrics["grad_norm"] > 0
            engine.update_weights(step + 1)
    changed = [bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True)]
    assert sum(changed) > 0.9 * len(changed)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_5_text"])
def test_a_reply_is_the_same_alone_and_beside_requests_that_come_and_go(tiny_policy: Any, kind: str) -> None:
    model, tokenizer = small_causal_lm(kind, vocab_size=339), tiny_policy[1]
    with closing(LocalEngine(model, tokenizer, max_model_len=96)) as engine:
        samplings = [Sampling(seed=number, max_tokens=30 - 5 * number) for number in range(len(PROMPTS))]
        pairs = list(zip(PROMPTS, samplings, strict=True))
        alone = [engine.submit(*pair).result(60) for pair in pairs]
        together = []
        for pair in pairs:
            second = threading.Semaphore(0)
            together.append(engine.submit(*pair, on_token=lambda *_, semaphore=second: semaphore.release()))
            assert second.acquire(timeout=600)
            assert second.acquire(timeout=600)  # the next one comes when this one has two tokens
        for future, expected in zip(together, alone, strict=True):
            assert future.result(60).token_ids == expected.token_ids
            assert future.result().logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize(("bf16", "rank", "tolerance"), [(False, 2, 1e-4), (True, 0, 0.05)])
def test_the_sampler_computes_adapters_merged_and_products_as_the_update_does(
    tiny_policy: Any, bf16: bool, rank: int, tolerance: float
) -> None:
    model, tokenizer = small_causal_lm("lfm2", vocab_size=339, initializer_range=0.1), tiny_policy[1]
    if rank:
        pytest.importorskip("peft")
        add_adapters(model, rank=rank, alpha=16)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.2)
    with closing(LocalEngine(model, tokenizer, max_model_len=96, bf16=bf16)) as engine:
        with merged_weights(model):
            engine.update_weights(1)
        for reply in sample(engine, PROMPTS):
            ids = torch.tensor([[*reply.prompt_ids, *reply.token_ids]])
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(ids).logits[0, len(reply.prompt_ids) - 1 : -1].float()
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]
            assert reply.logprobs == pytest.approx(expected.tolist(), abs=tolerance)
