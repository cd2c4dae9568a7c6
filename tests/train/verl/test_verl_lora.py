"""A checkpoint with adapters, as verl writes it, becomes a model that transformers loads with the adapted weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from dev.pretrain.model import new_policy
from safetensors.torch import load_file, save_file

from groundwire.train.policy.model import load_policy
from groundwire.train.policy.pretrained.model_files import save_policy
from groundwire.train.verl.launch import link_newest_model, merge_adapters, peft_problem

RANK, ALPHA = 4, 8
ADAPTED = "self_attn.q_proj"


def _adapted(folder: Path, shards: int) -> dict[str, torch.Tensor]:
    """Rewrite the folder's weights under peft's names, with adapters; returns the deltas by parameter name."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    deltas, named = {}, {}
    for name, value in state.items():
        if f"{ADAPTED}.weight" in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = torch.randn(RANK, value.shape[1]), torch.randn(value.shape[0], RANK)
            named |= {f"{module}.lora_A.default.weight": a, f"{module}.lora_B.default.weight": b}
            named[f"{module}.base_layer.weight"] = value
            deltas[name] = ALPHA / RANK * b @ a
        else:
            named[f"base_model.model.{name}"] = value
    names = sorted(named)
    places = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: named[name].contiguous() for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return deltas


def _checkpoint(tiny_policy, run: Path) -> tuple[Path, dict[str, torch.Tensor], torch.nn.Module]:
    _, tokenizer = tiny_policy
    plain = new_policy(tokenizer, width=16, layers=2, heads=2, intermediate=16, seed=3)
    folder = run / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    save_policy(plain, tokenizer, folder)
    deltas = _adapted(folder, shards=2)
    (folder.parent / "lora_train_meta.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}))
    return folder, deltas, plain


@pytest.mark.parametrize(
    ("installed", "message"), [("0.20.0", None), ("0.21.2", "peft 0.21.2 hides"), (None, "not installed")]
)
def test_an_unsuitable_peft_is_reported(installed: str | None, message: str | None, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if installed:
        folder = tmp_path / f"peft-{installed}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: peft\nVersion: {installed}\n")
    problem = peft_problem()
    if message is None:
        assert problem is None
    else:
        assert problem is not None
        assert message in problem[0]
        assert problem[1] == "pip install 'peft<0.21'"


def test_the_exported_model_has_the_adapted_weights(tiny_policy, tmp_path: Path) -> None:
    folder, deltas, plain = _checkpoint(tiny_policy, tmp_path)
    link_newest_model(tmp_path)
    assert (tmp_path / "model").resolve() == folder.resolve()
    loaded, _ = load_policy(tmp_path / "model")
    before = dict(plain.named_parameters())
    assert len(deltas) == 2
    for name, value in loaded.named_parameters():
        torch.testing.assert_close(value, before[name] + deltas.get(name, torch.zeros(())))
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]


def test_merging_again_changes_nothing(tiny_policy, tmp_path: Path) -> None:
    folder, _, _ = _checkpoint(tiny_policy, tmp_path)
    settings = folder.parent / "lora_train_meta.json"
    merge_adapters(folder, settings)
    once = (folder / "model.safetensors").read_bytes()
    merge_adapters(folder, settings)
    assert (folder / "model.safetensors").read_bytes() == once
