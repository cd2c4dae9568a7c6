"""Models that our own decoder does not know are sampled by transformers' forward pass, and trained."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pytest
from small_models import ARCHITECTURES, small_causal_lm
from training_groups import Sampled, llm_call, training_groups

from groundwire.train.local.grpo import GRPO, GRPOConfig
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
