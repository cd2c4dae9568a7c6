"""The terms of the loss equal verl's, and reference computations that are written out token by token."""

from __future__ import annotations

import json
import math

import pytest
import torch
from programs import ROOT

from groundwire.train.algorithms.losses import clipped_policy_loss, kl_to_reference, learning_rate, token_weights

VERL = json.loads((ROOT / "tests" / "data" / "verl_0_9_1_losses.json").read_text())
NAMES = {"token-mean": "token-mean", "seq-mean-token-mean": "sequence-mean", "seq-mean-token-sum-norm": "dr-grpo"}

LENGTHS = [3, 1, 0, 4]
"""Trained tokens of four sequences."""


def _tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """New and old log-probabilities, advantages, and the number of each token's sequence."""
    generator = torch.Generator().manual_seed(3)
    sequences = torch.tensor([number for number, length in enumerate(LENGTHS) for _ in range(length)])
    new = -2 * torch.rand(len(sequences), generator=generator)
    old = new + 0.6 * torch.randn(len(sequences), generator=generator)
    return new.requires_grad_(), old, torch.tensor([1.5, -0.5, 0.3, -1.0])[sequences], sequences


def _token_loss(ratio: float, advantage: float, low: float = 0.2, high: float = 0.3, dual: float = 3.0) -> float:
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * dual) if advantage < 0 else loss


def _by_sequence(values: list[float]) -> list[list[float]]:
    rest = iter(values)
    return [[next(rest) for _ in range(length)] for length in LENGTHS if length]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("token-mean", lambda parts: sum(map(sum, parts)) / 8),
        ("sequence-mean", lambda parts: sum(sum(part) / len(part) for part in parts) / 3),
        ("dr-grpo", lambda parts: sum(map(sum, parts)) / (3 * 16)),
    ],
)
def test_the_tokens_losses_are_aggregated_as_the_setting_says(loss, expected) -> None:
    new, old, advantages, sequences = _tokens()
    weights = torch.tensor(token_weights(LENGTHS, loss, max_tokens=16))[sequences]
    value, _ = clipped_policy_loss(new, old, advantages, weights)
    ratios = (new - old).exp().tolist()
    losses = [_token_loss(*pair) for pair in zip(ratios, advantages.tolist(), strict=True)]
    assert float(value.detach()) == pytest.approx(expected(_by_sequence(losses)), abs=1e-6)


@pytest.mark.parametrize("case", VERL, ids=lambda case: f"{case['loss_mode']}-{case['loss_agg_mode']}")
def test_losses_gradients_and_kl_terms_equal_verls(case: dict) -> None:
    new = torch.tensor(case["new"], requires_grad=True)
    old, mask = torch.tensor(case["old"]), torch.tensor(case["mask"])
    sequences = torch.arange(len(mask))[:, None].expand(mask.shape)
    loss = "gspo" if case["loss_mode"] == "gspo" else NAMES[case["loss_agg_mode"]]
    weights = torch.tensor(token_weights(mask.sum(1).tolist(), loss, max_tokens=16))[sequences]
    trained = mask.bool()
    value, _ = clipped_policy_loss(
        new[trained],
        old[trained],
        torch.tensor(case["advantages"])[trained],
        weights[trained],
        sequences=sequences[trained] if loss == "gspo" else None,
    )
    value.backward()
    assert float(value.detach()) == pytest.approx(case["loss"], abs=1e-6)
    torch.testing.assert_close(new.grad, torch.tensor(case["grad"]), atol=1e-6, rtol=0)
    torch.testing.assert_close(kl_to_reference(new.detach(), old), torch.tensor(case["kl"]), atol=1e-6, rtol=0)


def test_gspo_has_one_ratio_for_a_sequence_and_a_gradient_for_each_of_its_tokens() -> None:
    new, old, advantages, sequences = _tokens()
    weights = torch.tensor(token_weights(LENGTHS, "gspo", max_tokens=16))[sequences]
    value, metrics = clipped_policy_loss(new, old, advantages, weights, sequences=sequences)
    value.backward()
    expected, gradients = 0.0, []
    for part, advantage in zip(_by_sequence((new - old).tolist()), (1.5, -0.5, -1.0), strict=True):
        ratio = math.exp(sum(part) / len(part))
        loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
        expected += loss / 3
        free = loss == -advantage * ratio
        gradients += [-advantage * ratio / (3 * len(part)) if free else 0.0] * len(part)
    assert float(value.detach()) == pytest.approx(expected, abs=1e-6)
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor(gradients))
    assert 0 < metrics["ratio_min"] < 1 < metrics["ratio_max"]


def test_the_kl_term_is_schulmans_k3() -> None:
    new, reference = torch.tensor([-1.0, -2.0, -0.1, -1.0, -30.0]), torch.tensor([-1.0, -1.0, -3.0, -1.5, 0.0])
    d = [b - a for a, b in zip(new.tolist(), reference.tolist(), strict=True)]
    expected = [min(10.0, math.exp(min(x, 20)) - min(x, 20) - 1) for x in d]
    torch.testing.assert_close(kl_to_reference(new, reference), torch.tensor(expected))


def test_the_cut_of_the_kl_term_keeps_its_gradient() -> None:
    new, reference = torch.tensor([-6.0, -1.0, -30.0, -60.0], requires_grad=True), torch.tensor([-1.0, -40.0, 0.0, 0.0])
    kl = kl_to_reference(new, reference)
    kl.sum().backward()
    assert kl.tolist() == [10.0] * 4
    expected = [1 - math.exp(min(20.0, b - a)) for a, b in zip(new.tolist(), reference.tolist(), strict=True)]
    torch.testing.assert_close(new.grad, torch.tensor(expected))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_the_learning_rate_rises_and_then_follows_its_schedule(schedule, expected) -> None:
    rates = [
        learning_rate(step, base=2.0, schedule=schedule, warmup_steps=2, total_steps=6) for step in range(len(expected))
    ]
    assert rates == pytest.approx([2 * value for value in expected])
