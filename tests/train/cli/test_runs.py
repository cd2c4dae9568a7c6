"""``groundwire runs``."""

from __future__ import annotations

import json
from pathlib import Path

from programs import run

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve


def test_runs_are_listed_with_their_model_step_and_state(tmp_path: Path) -> None:
    for name, model in (("first", "starter"), ("second", "smollm2")):
        config = resolve("fast", model=model, steps=3, agent="my_app:graph").to_dict()
        RunDir.create(tmp_path / name, backend="custom", domain="spider", config=config)
    (tmp_path / "runs").mkdir()
    for name in ("first", "second"):
        [path] = [path for path in (tmp_path / name).iterdir() if not path.is_symlink()]
        path.rename(tmp_path / "runs" / name)
    (broken := tmp_path / "runs" / "third").mkdir()
    (broken / "config.json").write_text("{")
    listed = run("-m", "groundwire", "runs", folder=tmp_path)
    assert listed.returncode == 0, listed.stderr
    columns, first, second, third = listed.stdout.splitlines()
    assert columns.split() == ["Run", "Agent", "Tasks", "Model", "Step", "Reward", "Accuracy", "State"]
    assert first.split() == ["first", "my_app:graph", "spider", "starter", "0", "of", "3", "-", "-", "not", "ended"]
    assert "smollm2" in second
    assert "config.json" in third
    assert "smollm2" in run("-m", "groundwire", "runs", "--name", "smol", folder=tmp_path).stdout
    none = run("-m", "groundwire", "runs", "--name", "other", folder=tmp_path)
    assert none.returncode == 2
    assert "has no run whose name, agent or model contains 'other'" in none.stderr
    assert json.loads((tmp_path / "runs" / "first" / "config.json").read_text())["steps"] == 3
