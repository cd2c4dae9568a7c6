"""An update of the local trainer: gradients that are not finite, bounded memory, and the options of the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import bandits
import pytest
import torch
from test_grpo import _batch, _policy
from test_token_logprobs import LargestTensor
from training_groups import Sampled, training_groups
from transformers import LlamaForCausalLM

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.local.grpo import GRPO, GRPOConfig
from groundwire.train.local.packing import Row, WeightedItem, forward_batches, make_rows
from groundwire.train.local.trainer import LocalTrainer
from groundwire.train.policy.errors import NonFiniteGradientError
from groundwire.train.policy.model import load_policy


def _weights(model: LlamaForCausalLM) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _updated(**settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """The weights after one update of the same model on the same batch, and its metrics."""
    model = _policy()
    metrics = GRPO(model, GRPOConfig(minibatches=1, **settings)).update(training_groups(_batch(model)))
    return _weights(model), metrics


def _prepared(**settings: Any) -> tuple[GRPO, LlamaForCausalLM, list[Sampled]]:
    """A trainer without a step done, its model, and a batch of which the model has moved away: ratios are not 1."""
    model = _policy()
    batch = _batch(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    reference = _policy() if settings.get("kl_coef") else None
    return GRPO(model, GRPOConfig(minibatches=1, **settings), reference=reference), model, batch


def _sequences(model: LlamaForCausalLM, batch: list[Sampled]) -> list[tuple[torch.Tensor, ...]]:
    """For each trajectory: log-probabilities and entropies by a plain pass, old log-probabilities, advantage."""
    found = []
    for group in ("0", "1", "2"):
        rollouts = [rollout for rollout in batch if rollout.group == group]
        rewards = torch.tensor([rollout.reward for rollout in rollouts])
        for rollout, advantage in zip(rollouts, (rewards - rewards.mean()) / rewards.std(), strict=True):
            for t in rollout.trajectories:
                logits = model(torch.tensor([t.prompt_ids + t.response_ids])).logits[0, len(t.prompt_ids) - 1 : -1]
                distribution = torch.distributions.Categorical(logits=logits)
                new = distribution.log_prob(torch.tensor(t.response_ids))
                found.append((new, distribution.entropy(), torch.tensor(t.logprobs), advantage))
    return found


def _items(count: int) -> list[WeightedItem]:
    model = _policy()
    trajectories = [t for rollout in _batch(model) for t in rollout.trajectories][:count]
    return [
        WeightedItem(trajectory=t, mask=t.loss_mask, advantages=[1.0] * len(t.response_ids), weight=0.0, penalty=0.0)
        for t in trajectories
    ]


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    model = _policy()
    batch, grpo = _batch(model), GRPO(model, GRPOConfig(minibatches=2))
    before = _weights(model)
    hook = next(model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    metrics = grpo.update(training_groups(batch))
    assert metrics["updates_skipped"] == grpo.skipped_in_a_row == 2
    assert torch.equal(_weights(model), before)
    assert all(map(math.isfinite, metrics.values()))  # JSON has no NaN
    hook.remove()
    assert "updates_skipped" not in grpo.update(training_groups(batch))
    assert grpo.skipped_in_a_row == 0
    assert not torch.equal(_weights(model), before)
    assert _weights(model).isfinite().all()


def test_several_such_updates_end_the_run_with_the_last_good_weights(
    tiny_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Overflowing(LocalTrainer):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            assert self.engine.max_batch == 3
            next(self.model.parameters()).register_hook(lambda gradient: gradient * torch.inf)

    async def agent(choose: bandits.Choose) -> str:
        return await choose("which?", "01")

    monkeypatch.setattr(bandits, "LocalTrainer", Overflowing)
    with pytest.raises(
        NonFiniteGradientError, match=r"5 updates in a row are not finite.*lower learning_rate \(0.0003\)"
    ):
        bandits.train(
            tmp_path, tiny_policy, agent, float, steps=9, group_size=8, minibatches=1, val_temperature=1.0, n_runners=3
        )
    run = RunDir(tmp_path / "run")
    assert [line.get("updates_skipped") for line in run.metrics()] == [None, 1, 1, 1, 1, 1]
    assert run.checkpoints.last_step() == 5
    saved, _ = load_policy(run.checkpoints.paths()[-1])
    torch.testing.assert_close(_weights(saved), _weights(tiny_policy[0]))


def test_the_reference_of_a_run_is_the_model_at_its_start(tiny_policy: Any, tmp_path: Path) -> None:
    async def agent(choose: bandits.Choose) -> str:
        return await choose("which?", "01")

    settings = {"steps": 3, "group_size": 16, "kl_coef": 0.01, "warmup_steps": 0, "seed": 1, "learning_rate": 1e-3}
    run = bandits.train(tmp_path, tiny_policy, agent, float, **settings)
    first, *later = [line["kl_reference"] for line in run.metrics()[1:]]
    # The figure is of the second of two minibatches, after one step.
    assert 0 <= first < min(later)


def test_a_row_has_at_most_the_given_tokens_unless_one_trajectory_has_more() -> None:
    items = _items(24)
    longest = max(len(item.trajectory) for item in items)
    for tokens in (1, longest, 60, 10_000):
        rows = make_rows(items, branches=8, tokens=tokens)
        assert sum(len(row.items) for row in rows) == len(items)
        assert all(row.length <= tokens or len(row.items) == 1 for row in rows)
        for batch in forward_batches(rows, tokens):
            assert len(batch) * max(row.length for row in batch) <= max(tokens, longest)
    assert len(make_rows(items, branches=8, tokens=60)) > len(make_rows(items, branches=8, tokens=10_000))


def test_the_size_of_a_pass_bounds_every_tensor_of_the_update() -> None:
    def largest(tokens: int) -> int:
        model = _policy()
        batch, grpo = _batch(model), GRPO(model, GRPOConfig(tokens_per_forward=tokens, logits_per_chunk=400))
        with LargestTensor() as measured:
            grpo.update(training_groups(batch))
        return measured.size

    parameters = max(parameter.numel() for parameter in _policy().parameters())
    assert largest(32) <= max(parameters, 32 * 32 * 2)  # attention's scores have 2 heads
    assert largest(10_000) > 4 * largest(32)


@pytest.mark.parametrize(
    "settings",
    [{"logits_per_chunk": 40}, {"logits_per_chunk": 400}, {"gradient_checkpointing": True}, {"tokens_per_forward": 30}],
    ids=lambda settings: next(iter(settings)),
)
def test_saving_memory_does_not_change_the_update(settings: dict[str, Any]) -> None:
    torch.testing.assert_close(_updated(**settings)[0], _updated()[0], atol=1e-5, rtol=0)


def test_gradient_checkpointing_computes_each_layer_twice() -> None:
    counts = dict[bool, int]()
    for on in (False, True):
        model = _policy()
        calls: list[None] = []
        model.model.layers[0].input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(None))
        batch = _batch(model)
        calls.clear()
        GRPO(model, GRPOConfig(minibatches=1, gradient_checkpointing=on)).update(training_groups(batch))
        counts[on] = len(calls)
    assert counts[True] == 2 * counts[False] > 0


def test_bf16_rounds_the_products_and_not_the_weights() -> None:
    model = _policy()
    batch, kinds = _batch(model), set[torch.dtype]()
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, __, output: kinds.add(output.dtype))
    metrics = GRPO(model, GRPOConfig(minibatches=1, bf16=True)).update(training_groups(batch))
    assert kinds == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 1e-5 < metrics["initial_ratio_error"] < 0.1
    assert metrics["grad_norm"] == pytest.approx(_updated()[1]["grad_norm"], rel=0.1)


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("cpu", "auto", (False, False)),
        ("cuda", "auto", (True, True)),
        ("cuda:1", "fp32", (False, True)),
        ("cpu", "bf16", (True, False)),
    ],
)
def test_the_memory_settings_follow_the_device(device: str, precision: str, expected: tuple[bool, bool]) -> None:
    config = GRPOConfig.from_settings(resolve("fast", device=device, precision=precision))
    assert (config.bf16, config.gradient_checkpointing) == expected
    assert (config.branches_per_row == 8) == (device == "cpu")


def test_the_first_minibatch_compares_the_trainer_with_the_sampler() -> None:
    model = _policy()
    batch = _batch(model)
    shifted = [
        replace(
            rollout, calls=[replace(call, logprobs=[value - 0.1 for value in call.logprobs]) for call in rollout.calls]
        )
        for rollout in batch
    ]
    metrics = GRPO(model, GRPOConfig(minibatches=1)).update(training_groups(shifted))
    old = [math.exp(value) for rollout in shifted for t in rollout.trajectories for value in t.logprobs]
    assert metrics["sampler_kl"] == pytest.approx(-0.1, abs=1e-4)
    assert metrics["probability_difference"] == pytest.approx(
        sum(value * (math.exp(0.1) - 1) for value in old) / len(old), rel=1e-3
    )


def test_the_entropy_is_that_of_the_policy_at_the_trained_tokens() -> None:
    model = _policy()
    batch = _batch(model)
    entropies: list[float] = []
    for t in (t for rollout in batch for t in rollout.trajectories):
        with torch.no_grad():
            logits = model(torch.tensor([t.prompt_ids + t.response_ids])).logits[0, len(t.prompt_ids) - 1 : -1]
        entropies += torch.distributions.Categorical(logits=logits).entropy().tolist()
    metrics = GRPO(model, GRPOConfig(minibatches=1)).update(training_groups(batch))
    assert metrics["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)


def test_an_update_without_memory_goes_on_with_smaller_passes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = _updated()
    evaluate, limit = GRPO._evaluate, 60

    def small_memory(self: GRPO, rows: list[Row]) -> Any:
        if sum(row.length for row in rows) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return evaluate(self, rows)

    monkeypatch.setattr(GRPO, "_evaluate", small_memory)
    weights, metrics = _updated(tokens_per_forward=200)
    assert torch.allclose(weights, expected, atol=1e-6)
    assert metrics["tokens_trained"] > 0
    assert "going on with tokens_per_forward=50" in caplog.text

    limit = 0
    with pytest.raises(torch.OutOfMemoryError):  # one trajectory is the smallest pass
        _updated(tokens_per_forward=200)


def _ppo(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    ratio = (new - old).exp()
    losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3))
    return torch.minimum(losses, -3 * advantage) if advantage < 0 else losses


@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean", "dr-grpo", "gspo"])
def test_the_loss_of_an_update_is_the_chosen_mean(loss: Any) -> None:
    grpo, model, batch = _prepared(loss=loss, max_tokens=9, tokens_per_forward=40)
    sequences = _sequences(model, batch)
    tokens = [_ppo(new, old, advantage) for new, _, old, advantage in sequences]
    ratios = [(new - old).mean().exp() for new, _, old, _ in sequences]
    advantages = [advantage for *_, advantage in sequences]
    expected = {
        "token-mean": torch.cat(tokens).mean(),
        "sequence-mean": torch.stack([each.mean() for each in tokens]).mean(),
        "dr-grpo": torch.cat(tokens).sum() / (len(tokens) * 9),
        "gspo": torch.stack(
            [torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.3)) for a, ratio in zip(advantages, ratios, strict=True)]
        ).mean(),
    }
    assert len({round(float(value.detach()), 6) for value in expected.values()}) == 4
    expected[loss].backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    metrics = grpo.update(training_groups(batch))
    assert metrics["loss"] == pytest.approx(float(expected[loss].detach()), rel=1e-3, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-3)


def test_the_kl_term_and_the_entropy_are_parts_of_the_loss() -> None:
    def loss(**settings: float) -> float:
        return _prepared(**settings)[0].update(training_groups(_prepared()[2]))["loss"]

    _, model, batch = _prepared()
    sequences = _sequences(model, batch)
    before = torch.cat([old for _, _, old, _ in sequences])  # the reference is the policy that sampled
    new, entropy = torch.cat([each[0] for each in sequences]), torch.cat([each[1] for each in sequences])
    divergence = ((before - new).exp() - (before - new) - 1).mean().detach()
    assert float(divergence) > 1e-3
    assert loss(kl_coef=0.5) - loss() == pytest.approx(0.5 * float(divergence), rel=1e-3)
    assert loss(entropy_coef=0.5) - loss() == pytest.approx(-0.5 * float(entropy.detach().mean()), rel=1e-3)


def test_both_terms_train_groups_with_equal_rewards() -> None:
    for settings, sign in (({"kl_coef": 1.0}, -1), ({"entropy_coef": 1.0}, 1)):
        grpo, _, batch = _prepared(learning_rate=1e-3, warmup_steps=0, **settings)
        equal = [replace(rollout, reward=1.0) for rollout in batch]
        figure = "kl_reference" if sign < 0 else "entropy"
        first, second = grpo.update(training_groups(equal)), grpo.update(training_groups(equal))
        assert first["groups_used"] == 0
        assert sign * (second[figure] - first[figure]) > 0


def test_without_a_reference_there_is_no_kl_term() -> None:
    with pytest.raises(ValueError, match=r"kl_coef is 0\.5: give GRPO the reference"):
        GRPO(_policy(), GRPOConfig(kl_coef=0.5))


def test_advantages_that_are_not_scaled_give_a_smaller_gradient() -> None:
    # Two rewards of 0 and two of 1 have the deviation 0.577.
    scaled = _updated()[1]
    model = _policy()
    plain = GRPO(model, GRPOConfig(minibatches=1)).update(training_groups(_batch(model), loss="dr-grpo"))
    assert plain["grad_norm"] == pytest.approx(0.57735 * scaled["grad_norm"], rel=1e-3)


def test_truncated_replies_do_not_count_as_tokens_if_they_are_masked() -> None:
    model = _policy()
    batch = [_truncated(rollout) if rollout.reward else rollout for rollout in _batch(model)]
    rewarded = sum(len(t.response_ids) for rollout in batch for t in rollout.trajectories if rollout.reward)
    total = sum(len(t.response_ids) for rollout in batch for t in rollout.trajectories)
    modes: list[Any] = ["train", "mask", "zero"]
    updates = {
        mode: GRPO(_policy(), GRPOConfig(minibatches=1)).update(training_groups(batch, truncated=mode))
        for mode in modes
    }
    assert updates["train"]["tokens_trained"] == total
    assert updates["mask"]["tokens_trained"] == total - rewarded
    assert updates["zero"]["groups_used"] == 0


def _truncated(rollout: Sampled) -> Sampled:
    return replace(rollout, calls=[replace(call, finish_reason="length") for call in rollout.calls])


@pytest.mark.parametrize(("truncated", "used"), [("train", 1), ("mask", 0), ("zero", 0)])
def test_the_sampler_names_truncated_replies(truncated: str, used: int, tiny_policy: Any, tmp_path: Path) -> None:
    async def agent(choose: bandits.Choose) -> str:
        return await choose("which?", "01")

    settings = {"group_size": 16, "max_tokens": 1, "truncated": truncated}  # the digit, without the token of the end
    run = bandits.train(tmp_path, tiny_policy, agent, float, **settings)
    assert run.metrics()[-1]["truncated_share"] == 1.0
    assert run.metrics()[-1]["groups_used"] == used
    assert ("tokens_trained" in run.metrics()[-1]) == bool(used)


def test_a_larger_gradient_is_scaled_down_to_the_limit() -> None:
    grpo, model, batch = _prepared(max_grad_norm=1e-3)
    assert grpo.update(training_groups(batch))["grad_norm"] > 1e-3  # as it was before
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_the_steps_follow_the_schedule_of_the_learning_rate() -> None:
    grpo, _, batch = _prepared(learning_rate=1.0, lr_schedule="linear", warmup_steps=2, total_steps=4)
    grpo.optimizer.step = lambda: None  # such steps would destroy the model
    assert [grpo.update(training_groups(batch))["learning_rate"] for _ in range(4)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.5]
    )


def test_the_schedule_counts_steps_without_a_gradient() -> None:
    grpo, _, batch = _prepared(learning_rate=1.0, lr_schedule="linear", warmup_steps=0, total_steps=4)
    grpo.optimizer.step = lambda: None
    equal = [replace(rollout, reward=1.0) for rollout in batch]
    rates = [grpo.update(training_groups(each)).get("learning_rate") for each in (batch, equal, equal, batch)]
    assert rates == [1.0, None, None, 0.25]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.4, 0.2]),
        ({"total_steps": 8}, [0.5, 0.4]),  # it falls from there to 0 at the new end
        ({"total_steps": 4}, [0.3]),
        ({"lr_schedule": "constant"}, [0.6, 0.6]),
        ({"warmup_steps": 9}, [0.8, 1.0, 1.0]),  # never above the setting
        ({"learning_rate": 2.0}, [0.8, 0.4]),  # another rate was asked for
    ],
)
def test_a_resumed_schedule_goes_on_from_the_last_rate(changes: dict[str, Any], expected: list[float]) -> None:
    settings = {"learning_rate": 1.0, "lr_schedule": "linear", "warmup_steps": 0, "total_steps": 5}
    before, _, batch = _prepared(**settings)
    before.optimizer.step = lambda: None
    assert [before.update(training_groups(batch))["learning_rate"] for _ in range(3)] == pytest.approx([1.0, 0.8, 0.6])
    after, *_ = _prepared(**{**settings, **changes})
    note = after.load_state(before.state())
    assert ("the learning rate goes on from 0.6" in note) == (changes != {} and "learning_rate" not in changes)
    after.optimizer.step = lambda: None
    assert [after.update(training_groups(batch))["learning_rate"] for _ in expected] == pytest.approx(expected)


@pytest.mark.parametrize("term", ["kl_coef", "entropy_coef"])
@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean", "dr-grpo"])
def test_groups_without_a_gradient_do_not_dilute_the_policy_gradient(term: str, loss: Any) -> None:
    def first_step(**settings: float) -> tuple[torch.Tensor, int]:
        grpo, model, batch = _prepared(loss=loss, **settings)
        grpo.config = replace(grpo.config, minibatches=2)
        gradients: list[torch.Tensor] = []
        grpo.optimizer.step = lambda: gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        equal = [replace(rollout, group=f"{rollout.group} {n}", reward=1.0) for rollout in batch for n in range(3)]
        grpo.update(training_groups([*equal, *batch]))
        return gradients[0], len(gradients)

    (plain, steps), (with_term, same_steps) = first_step(), first_step(**{term: 1e-9})
    assert steps == same_steps == 2
    torch.testing.assert_close(with_term, plain, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("tokens", [30, 60])
def test_the_metrics_of_an_update_in_several_passes_are_means(tokens: int) -> None:
    def metrics(tokens: int) -> dict[str, float]:
        grpo, _, batch = _prepared(kl_coef=0.1, tokens_per_forward=tokens)
        return grpo.update(training_groups(batch))

    whole, parts = metrics(10_000), metrics(tokens)
    assert min(whole["clip_fraction"], whole["kl_reference"]) > 0
    for name in ("tokens_computed", "update_flops"):  # short passes share less
        assert parts.pop(name) > whole.pop(name)
    assert parts == pytest.approx(whole, rel=1e-3, abs=1e-5)


def test_an_update_whose_loss_is_not_finite_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = GRPO._loss

    def not_a_number(self: GRPO, tokens: Any) -> Any:
        value, metrics = loss(self, tokens)
        return value + math.nan * value.detach(), metrics  # the gradient is finite

    monkeypatch.setattr(GRPO, "_loss", not_a_number)
    grpo, model, batch = _prepared()
    before = _weights(model)
    assert grpo.update(training_groups(batch))["updates_skipped"] == grpo.skipped_in_a_row == 1
    assert torch.equal(_weights(model), before)


def test_an_error_in_the_middle_of_an_update_never_checkpoints_half_updated_weights(
    tiny_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def agent(choose: bandits.Choose) -> str:
        return await choose("which?", "01")

    minibatch, count = GRPO._minibatch, 0

    def without_memory(self: GRPO, *args: Any) -> None:
        nonlocal count
        minibatch(self, *args)
        count += 1
        if count == 2:  # in the second step, whose weights are neither those of step 1 nor of step 2 now
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GRPO, "_minibatch", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        bandits.train(tmp_path, tiny_policy, agent, float, steps=3, group_size=16)
    run = RunDir(tmp_path / "run")
    assert [line["step"] for line in run.metrics()] == [0, 1]
    assert run.checkpoints.paths() == []
