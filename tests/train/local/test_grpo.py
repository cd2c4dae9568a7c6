"""GRPO's formulas equal verl's; its update raises the probability of rewarded replies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from group_advantages import normalize
from programs import ROOT
from training_groups import Sampled, llm_call, training_groups
from transformers import LlamaConfig, LlamaForCausalLM

from groundwire.adapters.tracing import LLMCall
from groundwire.train.algorithms.losses import clipped_policy_loss
from groundwire.train.local.grpo import GRPO, GRPOConfig

CASES = json.loads((ROOT / "tests" / "data" / "verl_0_9_1.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES)
def test_advantages_equal_verls(case: dict) -> None:
    members: dict[int, list[float]] = {}
    for reward, group in zip(case["rewards"], case["groups"], strict=True):
        members.setdefault(group, []).append(reward)
    advantages = {group: iter(normalize(rewards)) for group, rewards in members.items()}
    ours = torch.tensor([next(advantages[group]) for group in case["groups"]])
    mask = torch.tensor(case["mask"])
    assert torch.allclose(ours[:, None] * mask, torch.tensor(case["advantages"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_verls(case: dict) -> None:
    new = torch.tensor(case["new"], requires_grad=True)
    trained = torch.tensor(case["mask"]).bool()
    old, advantages = (torch.tensor(case[name])[trained] for name in ("old", "advantages"))
    loss, metrics = clipped_policy_loss(new[trained], old, advantages, torch.full_like(old, 1 / len(old)))
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert torch.allclose(new.grad, torch.tensor(case["grad"]), atol=1e-6, rtol=0)
    assert metrics["clip_fraction"] == pytest.approx(case["clip_fraction"], abs=1e-6)
    assert metrics["kl"] == pytest.approx(case["kl"], abs=1e-6)


def _calls(
    prompt: list[int], response: list[int], logprobs: list[float], mask: list[int] | None = None, first: int = 0
) -> list[LLMCall]:
    """Calls that make one trajectory: one for each run of ones in ``mask``."""
    mask = mask or [1] * len(response)
    starts = [at for at, (now, before) in enumerate(zip(mask, [0, *mask], strict=False)) if now > before]
    ends = [at for at, (now, after) in enumerate(zip(mask, [*mask[1:], 0], strict=True), 1) if now > after]
    return [
        llm_call(number, prompt + response[:start], response[start:end], logprobs=logprobs[start:end])
        for number, (start, end) in enumerate(zip(starts, ends, strict=True), first)
    ]


def _policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def _logprobs(model: LlamaForCausalLM, prompt: list[int], response: list[int]) -> list[float]:
    """The log-probabilities of transformers' forward pass, one sequence at a time."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def _batch(model: LlamaForCausalLM) -> list[Sampled]:
    """Three groups; rollouts of one to three calls, with prefixes shared, nested, or not at all."""
    generator = torch.Generator().manual_seed(1)

    def ids(n: int) -> list[int]:
        return torch.randint(0, 40, (n,), generator=generator).tolist()

    sampled = []
    for group in range(3):
        schema = ids(12)
        for member in range(4):
            calls = [schema + ids(5) for _ in range(1 + (group + member) % 3)]
            sampled.append((str(group), float(member % 2), [(prompt, ids(3 + member)) for prompt in calls]))
    logprobs = iter(_all_logprobs(model, [pair for _, _, pairs in sampled for pair in pairs]))
    return [
        Sampled(
            group,
            reward,
            [call for first, (p, r) in enumerate(pairs) for call in _calls(p, r, next(logprobs), first=first)],
        )
        for group, reward, pairs in sampled
    ]


def _all_logprobs(model: LlamaForCausalLM, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    """As ``_logprobs`` of each prompt and response, in one pass: no token sees the padding after it."""
    rows = [torch.tensor(prompt + response) for prompt, response in pairs]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        found = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None])[:, :, 0]
    return [
        each[len(prompt) - 1 : len(prompt) + len(response) - 1].tolist()
        for each, (prompt, response) in zip(found, pairs, strict=True)
    ]


def test_an_update_raises_the_probability_of_rewarded_replies() -> None:
    model = _policy()
    batch = _batch(model)
    metrics = GRPO(model, GRPOConfig(learning_rate=1e-2, warmup_steps=1)).update(training_groups(batch))
    change = {0.0: [], 1.0: []}
    for rollout in batch:
        for t in rollout.trajectories:
            now = _logprobs(model, t.prompt_ids, t.response_ids)
            change[rollout.reward].append(sum(now) - sum(t.logprobs))
    assert sum(change[1.0]) / len(change[1.0]) > 0 > sum(change[0.0]) / len(change[0.0])
    assert metrics["groups_used"] == 3


def test_the_first_ratio_is_one_however_trajectories_are_packed() -> None:
    for branches in (1, 3, 8):
        model = _policy()
        metrics = GRPO(model, GRPOConfig(branches_per_row=branches, tokens_per_forward=64)).update(
            training_groups(_batch(model))
        )
        assert metrics["initial_ratio_error"] < 1e-4


def test_packing_and_batching_do_not_change_the_update() -> None:
    updated = []
    for branches, tokens in ((1, 10_000), (8, 10_000), (8, 50)):
        model = _policy()
        GRPO(model, GRPOConfig(branches_per_row=branches, tokens_per_forward=tokens, minibatches=1)).update(
            training_groups(_batch(model))
        )
        updated.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(updated[0], updated[1], atol=1e-5)
    assert torch.allclose(updated[0], updated[2], atol=1e-5)


def test_context_between_sampled_tokens_is_read_but_not_trained() -> None:
    model = _policy()
    prompt, first, tool, second = [1, 2, 3], [4, 5], [6, 7, 8], [9]
    response = first + tool + second
    logprobs = _logprobs(model, prompt, response)
    mask = [1, 1, 0, 0, 0, 1]
    kept = [p if m else 0.0 for p, m in zip(logprobs, mask, strict=True)]
    rollouts = [
        Sampled("a", 1.0, _calls(prompt, response, kept, mask)),
        Sampled("a", 0.0, _calls(prompt, [5, 5], _logprobs(model, prompt, [5, 5]))),
    ]
    metrics = GRPO(model, GRPOConfig()).update(training_groups(rollouts))
    assert metrics["tokens_trained"] == 3 + 2
    assert metrics["initial_ratio_error"] < 1e-4


def test_a_batch_with_equal_rewards_does_not_change_the_model() -> None:
    model = _policy()
    before = [p.clone() for p in model.parameters()]
    rollouts = [Sampled("a", 1.0, [llm_call(0, [1, 2], [3])]) for _ in range(4)]
    assert GRPO(model, GRPOConfig()).update(training_groups(rollouts))["groups_used"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_group_teaches_if_credit_differs() -> None:
    def teaches(credit: str, *rewards: float, emitted: float | None = None) -> bool:
        first = llm_call(0, [1, 2], [3], reward=emitted)
        calls = [first, *[llm_call(0, [1, 2], [3]) for _ in rewards[1:]]]
        sampled = [Sampled("a", reward, [call]) for reward, call in zip(rewards, calls, strict=True)]
        [group] = training_groups(sampled, credit=credit)
        return group.teaches

    assert teaches("broadcast", 1.0, 0.0)
    assert not teaches("broadcast", 1.0)
    assert not teaches("broadcast", 0.0, 0.0, emitted=0.5)
    assert teaches("turns", 0.0, 0.0, emitted=0.5)


def test_a_call_cost_trains_a_group_of_equal_rewards_and_does_not_count_it_as_teaching() -> None:
    model = _policy()
    equal = [replace(rollout, reward=1.0) for rollout in _batch(model)]  # of one to three calls
    groups = training_groups(equal, call_cost=0.1)
    before = [p.clone() for p in model.parameters()]
    assert not any(group.teaches for group in groups)
    assert GRPO(model, GRPOConfig()).update(groups)["groups_used"] == 0
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_saved_state_continues_exactly(tmp_path: Path) -> None:
    straight, resumed = _policy(), _policy()
    batch = _batch(straight)
    one, two = GRPO(straight, GRPOConfig(), seed=3), GRPO(resumed, GRPOConfig(), seed=3)
    one.update(training_groups(batch)), two.update(training_groups(batch))
    torch.save(two.state(), tmp_path / "state.pt")
    three = GRPO(resumed, GRPOConfig(), seed=99)
    three.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    one.update(training_groups(batch)), three.update(training_groups(batch))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
