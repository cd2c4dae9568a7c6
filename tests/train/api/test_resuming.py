"""Resuming a run: its settings, its newest readable checkpoint, its number of steps."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from groundwire.train.api.resume import config_for_resume
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.run_reader import settings_changes
from groundwire.train.job.prepare import resolve_path
from groundwire.train.job.trainer import trainer_of
from groundwire.train.policy import STARTER
from groundwire.train.policy.errors import ModelUnreadableError
from groundwire.train.policy.model import load_initial_state, load_policy

NOTHING: dict[str, Any] = dict.fromkeys(
    ("trainer", "backend", "agent", "domain", "model", "data_dir", "seed", "steps", "judge", "verl")
)
VALIDATED = {"accuracy": 0.5, "ci95": [0.0, 1.0], "n": 1, "total": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of two steps, both with a checkpoint."""
    config = resolve("fast", steps=2).to_dict()
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config)
    for step in (1, 2):
        with run.checkpoints.write(step) as folder:
            shutil.copytree(STARTER, folder, dirs_exist_ok=True)
            torch.save({"step": step}, folder / "trainer.pt")
    return run


def _cut(run: RunDir, step: int, name: str) -> None:
    file = run.path / "checkpoints" / f"step-{step:05d}" / name
    file.write_bytes(file.read_bytes()[:200])


def test_a_new_number_of_steps_is_stored(run: RunDir) -> None:
    config = config_for_resume(run, {**NOTHING, "steps": 5, "device": "cuda"})
    assert (config.steps, config.device) == (5, "cuda")
    run.change_config({}, {}, steps=config.steps)
    again = config_for_resume(run, NOTHING)
    assert (again.steps, again.device) == (5, "cpu")
    assert settings_changes(run) == []


def test_each_part_of_a_run_has_the_settings_that_it_was_run_with(run: RunDir) -> None:
    run.change_config({"group_size": 8}, {"group_size": 4}, steps=3)
    with run.checkpoints.write(3):
        pass
    run.change_config({"group_size": 4, "credit": "turns"}, {"group_size": 2, "credit": "last"}, steps=9)
    assert [run.config(step)["group_size"] for step in range(5)] == [8, 8, 8, 4, 2]
    assert [run.config(step)["credit"] for step in (0, 3, 4)] == ["turns", "turns", "last"]
    assert (run.config()["group_size"], run.config()["steps"]) == (2, 9)
    assert settings_changes(run) == [
        "after step 2 the run was resumed with group_size 4 (was 8)",
        "after step 3 the run was resumed with credit 'last' (was 'turns'), group_size 2 (was 4)",
    ]


def test_a_part_whose_steps_were_lost_has_none(run: RunDir) -> None:
    """A run is resumed with other settings, and again from an older checkpoint, since the newest is damaged."""
    with run.checkpoints.write(3):
        pass
    run.change_config({"group_size": 8}, {"group_size": 4}, steps=9)
    shutil.rmtree(run.checkpoints.folder / "step-00003")
    run.change_config({"group_size": 4}, {"group_size": 2}, steps=9)
    assert [run.config(step)["group_size"] for step in (2, 3)] == [8, 2]


def test_new_steps_replace_the_old_ones_under_verls_name(tmp_path: Path) -> None:
    config = resolve("fast", trainer="verl", verl={"trainer.total_training_steps": 10, "data.seed": 3})
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config.to_dict())
    run.change_config({}, {}, steps=config_for_resume(run, {**NOTHING, "steps": 20}).steps)
    again = config_for_resume(run, NOTHING)
    assert (again.steps, again.seed, again.verl) == (20, 3, {})


def _finished(run: RunDir, config: RunConfig) -> str:
    return trainer_of(config.trainer).nothing_left(config, run)


@pytest.mark.parametrize(("steps", "over"), [(1, True), (2, True), (3, False)])
def test_a_finished_run_tells_how_to_continue(run: RunDir, steps: int, over: bool) -> None:
    message = _finished(run, config_for_resume(run, {**NOTHING, "steps": steps}))
    assert (
        message.startswith("all 2 steps are done; to train further, give more steps, e.g. --steps ")
        if over
        else not message
    )


def test_a_run_without_its_last_validation_is_not_finished(run: RunDir) -> None:
    run.append_metrics({"step": 2, "reward": 0.5})
    assert not _finished(run, config_for_resume(run, NOTHING))
    run.write_metrics(
        [*run.metrics()[:-1], {"step": 2, "reward": 0.5, "validation": VALIDATED, "validation_sampled": VALIDATED}]
    )
    assert _finished(run, config_for_resume(run, NOTHING))


def test_a_resumed_run_keeps_verls_settings(tmp_path: Path) -> None:
    stored = {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.1, "data.shuffle": False}
    config = resolve("fast", trainer="verl", verl=stored, steps=10)
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config.to_dict())
    assert config_for_resume(run, {**NOTHING, "steps": 20}).verl == stored
    changed = config_for_resume(run, {**NOTHING, "verl": {"data.shuffle": True}})
    assert changed.verl == {**stored, "data.shuffle": True}


def test_checkpoints_of_verl_count(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config={})
    assert run.checkpoints.last_step() == 0
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    assert _finished(run, RunConfig(steps=4, trainer="verl"))
    assert not _finished(run, RunConfig(steps=5, trainer="verl"))
    assert not _finished(run, RunConfig(steps=0, trainer="verl"))  # as many as its epochs have


@pytest.mark.parametrize("missing", ["config", "trainer", "steps"])
def test_stored_settings_without_a_required_key_are_damage(run: RunDir, missing: str) -> None:
    stored = run.config()
    del stored[missing]
    run.write_config(stored)
    with pytest.raises(RunDamagedError, match=f"has no '{missing}'"):
        config_for_resume(run, NOTHING)


def test_existing_folders_become_absolute_paths_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    os.symlink("one", tmp_path / "latest")
    monkeypatch.chdir(tmp_path)
    assert resolve_path("latest") == resolve_path("one") == str((tmp_path / "one").resolve())
    assert [resolve_path(name) for name in ("starter", "org/name", "no/such", None)] == [
        *("starter", "org/name", "no/such", None)
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "trainer.pt"])
def test_an_unreadable_checkpoint_is_replaced_by_the_previous_one(run: RunDir, name: str) -> None:
    config = config_for_resume(run, NOTHING)
    assert load_initial_state(config, run).state == {"step": 2}
    _cut(run, 2, name)
    start = load_initial_state(config, run)
    assert start.state == {"step": 1}
    assert "step-00002" in start.note
    assert "cannot be loaded: " in start.note
    assert start.note.endswith("going on from step-00001, and step-00002 is kept as damaged-step-00002")
    assert run.checkpoints.last_step() == 1
    assert not load_initial_state(config, run).note


def test_an_empty_trainer_file_is_damage(run: RunDir) -> None:
    (run.path / "checkpoints" / "step-00002" / "trainer.pt").write_bytes(b"")
    assert load_initial_state(config_for_resume(run, NOTHING), run).state == {"step": 1}


def test_unreadable_checkpoints_stay_if_no_other_is_left(run: RunDir) -> None:
    _cut(run, 1, "model.safetensors")
    _cut(run, 2, "trainer.pt")
    with pytest.raises(RunDamagedError, match=r"step-00002/trainer.pt cannot be loaded: .* no earlier checkpoint"):
        load_initial_state(config_for_resume(run, NOTHING), run)
    assert [folder.name for folder in run.checkpoints.paths()] == ["step-00001", "step-00002"]


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
def test_an_unusable_device_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '?{device}"):
        load_initial_state(resolve("fast", device=device), RunDir(tmp_path))


def test_an_incomplete_model_is_named(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(STARTER / name, tmp_path)
    with pytest.raises(ModelUnreadableError, match=r"the tokenizer in .* there is no tokenizer\.json"):
        load_policy(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ModelUnreadableError, match="the model in "):
        load_policy(tmp_path)
