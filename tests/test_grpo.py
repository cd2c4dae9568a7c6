"""GRPO's formulas are verl's, number for number; its update moves probability towards what was rewarded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from train.local.grpo import clipped_policy_loss, group_advantages

CASES = json.loads((Path(__file__).parent / "data" / "verl_0_9_1.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES)
def test_advantages_equal_verls(case: dict) -> None:
    ours = group_advantages(torch.tensor(case["rewards"]), [str(group) for group in case["groups"]])
    mask = torch.tensor(case["mask"])
    assert torch.allclose(ours[:, None] * mask, torch.tensor(case["advantages"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_verls(case: dict) -> None:
    new = torch.tensor(case["new"], requires_grad=True)
    loss, metrics = clipped_policy_loss(
        new, torch.tensor(case["old"]), torch.tensor(case["advantages"]), torch.tensor(case["mask"])
    )
    loss.backward()
    assert float(loss) == pytest.approx(case["loss"], abs=1e-6)
    assert torch.allclose(new.grad, torch.tensor(case["grad"]), atol=1e-6, rtol=0)
    assert metrics["clip_fraction"] == pytest.approx(case["clip_fraction"], abs=1e-6)
    assert metrics["kl"] == pytest.approx(case["kl"], abs=1e-6)


def test_a_rollout_of_five_calls_weighs_as_much_in_its_group_as_a_rollout_of_one() -> None:
    # The advantages know rollouts only: however many calls each holds, the mean is over rollouts.
    advantages = group_advantages(torch.tensor([1.0, 0.0]), ["a", "a"])
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-6)


def test_equal_rewards_give_no_gradient() -> None:
    assert group_advantages(torch.tensor([1.0, 1.0, 1.0]), ["a"] * 3).tolist() == [0.0, 0.0, 0.0]
