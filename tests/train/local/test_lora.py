"""Adapters are trained and the weights are not; the policy samples and is saved with both merged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bandits
import pytest
import torch
from test_grpo import _batch, _logprobs, _policy
from training_groups import training_groups

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.local.grpo import GRPO, GRPOConfig, check_state
from groundwire.train.local.lora import adapters, add_adapters, check_rank, merged_weights, without_adapters
from groundwire.train.policy.model import load_policy


def test_without_peft_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora_rank is 4, which needs the package peft .*groundwire\[lora\]"):
        add_adapters(_policy(), rank=4, alpha=8)


@pytest.mark.parametrize(
    ("saved", "rank"), [({}, 4), ({"adapters": {"q.lora_A.default.weight": torch.zeros(4, 9)}}, 0)]
)
def test_a_checkpoint_of_another_rank_is_refused(saved: dict[str, Any], rank: int) -> None:
    with pytest.raises(ConfigError, match=f"lora_rank is {rank}, but the checkpoint was trained with {4 - rank}"):
        check_rank(saved, rank)
    check_rank(saved, 4 - rank)


class TestWithPeft:
    """What needs the package."""

    @pytest.fixture(autouse=True)
    def _needs_peft(self) -> None:
        pytest.importorskip("peft")

    def test_an_update_changes_the_adapters_alone(self) -> None:
        model = _policy()
        batch, prompt, reply = _batch(model), [1, 2, 3], [4, 5]
        before = _logprobs(model, prompt, reply)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        add_adapters(model, rank=4, alpha=8)
        assert _logprobs(model, prompt, reply) == pytest.approx(before)
        metrics = GRPO(model, GRPOConfig(learning_rate=1e-2, warmup_steps=1)).update(training_groups(batch))
        assert metrics["groups_used"] == 3
        adapted = _logprobs(model, prompt, reply)
        assert adapted != pytest.approx(before, abs=1e-3)
        frozen = {name: value for name, value in model.state_dict().items() if ".lora_" not in name}
        assert all(torch.equal(value, start[name.replace(".base_layer", "")]) for name, value in frozen.items())
        with without_adapters(model):
            assert _logprobs(model, prompt, reply) == pytest.approx(before)
        with merged_weights(model) as weights, without_adapters(model):
            assert _logprobs(model, prompt, reply) == pytest.approx(adapted, abs=1e-5)
            plain = _policy()
            plain.load_state_dict(weights)
        assert _logprobs(plain, prompt, reply) == pytest.approx(adapted, abs=1e-5)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in frozen.items())

    def test_the_scale_is_alpha_over_rank(self) -> None:
        deltas = []
        for alpha in (4, 8):
            model = _policy()
            add_adapters(model, rank=4, alpha=alpha)
            with torch.no_grad():
                for name, value in adapters(model).items():
                    value.fill_(0.1 if ".lora_A." in name else 0.2)
            base = model.model.layers[0].mlp.up_proj.base_layer.weight.clone()
            with merged_weights(model):
                deltas.append(model.model.layers[0].mlp.up_proj.base_layer.weight - base)
        torch.testing.assert_close(deltas[0], torch.full_like(deltas[0], 4 * 0.1 * 0.2))
        torch.testing.assert_close(deltas[1], 2 * deltas[0])

    def test_the_reference_of_the_kl_term_is_the_model_without_adapters(self) -> None:
        model = _policy()
        batch = _batch(model)
        add_adapters(model, rank=4, alpha=8)
        grpo = GRPO(model, GRPOConfig(learning_rate=1e-2, warmup_steps=0, minibatches=1, kl_coef=0.1), reference=model)
        first, second = grpo.update(training_groups(batch)), grpo.update(training_groups(batch))
        assert first["kl_reference"] == pytest.approx(0.0, abs=1e-6)
        assert second["kl_reference"] > 1e-4

    def test_a_saved_state_continues_exactly(self, tmp_path: Path) -> None:
        batch = _batch(_policy())
        trainers = []
        for seed in (0, 1):
            model = _policy()
            add_adapters(model, rank=4, alpha=8, seed=seed)
            trainers.append(GRPO(model, GRPOConfig(), seed=seed))
        straight, resumed = trainers
        straight.update(training_groups(batch))
        torch.save(straight.state(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        check_state(_policy(), state)
        resumed.load_state(state)
        straight.update(training_groups(batch)), resumed.update(training_groups(batch))
        saved, loaded = adapters(straight.model), adapters(resumed.model)
        assert saved
        assert all(torch.equal(value, loaded[name]) for name, value in saved.items())

    def test_a_run_samples_and_saves_the_merged_policy(self, tiny_policy: Any, tmp_path: Path) -> None:
        async def agent(choose: bandits.Choose) -> str:
            return await choose("which?", "01")

        settings = {"steps": 3, "group_size": 16, "lora_rank": 4, "warmup_steps": 0, "learning_rate": 3e-3}
        bandits.train(tmp_path, tiny_policy, agent, float, **settings, checkpoint_every=1, seed=1)
        run = RunDir(tmp_path / "run")
        # Trainer and sampler agree at the first minibatch of each step, so the sampler has the adapters' weights.
        trained = [line for line in run.metrics() if "initial_ratio_error" in line]
        assert len(trained) > 1
        assert all(line["initial_ratio_error"] < 1e-3 for line in trained)
        saved, _ = load_policy(run.checkpoints.paths()[-1])
        names = dict(saved.named_parameters())
        moved = [name for name, value in tiny_policy[0].named_parameters() if not torch.equal(value, names[name])]
        assert moved
        assert all("proj" in name for name in moved)
