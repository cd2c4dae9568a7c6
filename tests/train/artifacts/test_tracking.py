"""``--track``: the metrics of a run reach its trackers, and a resumed run continues there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.tracking import check_trackers, flat_numbers, open_trackers
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.run import app
from groundwire.train.verl.hydra_config import flat_config

LINES: list[dict[str, Any]] = [
    {"step": 0, "validation": {"accuracy": 0.25, "ci95": [0.1, 0.4], "n": 8}, "wall_time_s": 2.0},
    {"step": 1, "reward": 0.5, "failures": {"timeout": 2}, "seconds": {"update": 0.5}, "wall_time_s": 3.0},
    {"step": 2, "reward": None, "wall_time_s": 4.0},
    {"step": 3, "reward": 0.75, "wall_time_s": 5.0},
]


def _run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, backend="langgraph", domain="spider", config={})


def _two_lives(config: RunConfig, run: RunDir) -> None:
    """Killed in step 3, which is written but has no checkpoint, and resumed after step 2."""
    with open_trackers(config, run, first_step=0) as log:
        for line in [*LINES[:3], {"step": 3, "reward": 0.1, "wall_time_s": 4.5}]:
            log(line)
    with open_trackers(config, run, first_step=2) as log:
        log(LINES[3])


def test_numbers_get_flat_names_without_the_step() -> None:
    assert dict(flat_numbers(LINES[0])) == {"validation/accuracy": 0.25, "validation/n": 8.0, "wall_time_s": 2.0}
    assert dict(flat_numbers({"step": 4, "reward": None, "note": "text", "done": True})) == {}


def test_tracker_names_are_separated_by_commas_and_checked() -> None:
    assert resolve("fast", track="wandb, tensorboard,wandb").track == ["wandb", "tensorboard"]
    with pytest.raises(ConfigError, match="track is 'tensorbord'; it must be 'tensorboard', 'wandb' or 'swanlab'"):
        resolve("fast", track="tensorbord")


def test_a_missing_package_is_a_one_line_error_before_the_run_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = importlib.util.find_spec
    without = {"wandb": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: without.get(name, there) and there(name))
    check_trackers([])
    done = CliRunner().invoke(app, ["--track", "wandb", "--trainer", "local", "--output-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "pip install -e '.[track]' in a clone" in done.output
    assert "data:" not in done.output
    assert not list(tmp_path.iterdir())


def test_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = _run_dir(tmp_path)
    _two_lives(resolve("fast", track=["tensorboard"]), run)
    shown = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert {"reward", "validation/accuracy", "failures/timeout", "seconds/update"} <= set(shown.Tags()["scalars"])
    assert [(each.step, each.value) for each in shown.Scalars("reward")] == [(1, 0.5), (3, 0.75)]
    assert [(each.step, each.value) for each in shown.Scalars("validation/accuracy")] == [(0, 0.25)]


def _records(data: bytes) -> Iterator[bytes]:
    """The records of one block (32 kB) of LevelDB's log format, in which W&B keeps a run that is offline."""
    place = 7  # after the file's own header
    while place + 7 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        yield data[place + 7 : place + 7 + size]
        place += 7 + size


def test_weights_and_biases_continues_the_same_run_also_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for name in ("WANDB_RUN_ID", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = _run_dir(tmp_path)
    _two_lives(resolve("fast", track=["wandb"]), run)
    ids, told = set(), []
    for file in sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, _records(file.read_bytes())):
            if record.HasField("run"):
                ids.add((record.run.project, record.run.run_id))
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                told += [(int(items["_step"]), float(items["reward"]))] if "reward" in items else []
    assert ids == {("groundwire", run.resources_id)}
    assert told == [(1, 0.5), (3, 0.1), (3, 0.75)]


def test_verl_gets_the_same_trackers() -> None:
    chosen = flat_config(resolve("fast", trainer="verl", track=["tensorboard", "wandb"]), run_dir="runs/one")
    assert chosen["trainer.logger"] == ["console", "file", "tensorboard", "wandb"]
    environment = {key.rpartition(".")[2]: value for key, value in chosen.items() if "env_vars." in key}
    assert environment["TENSORBOARD_DIR"] == "runs/one/tensorboard"
    assert environment["WANDB_RUN_ID"] == RunDir(Path("runs/one")).resources_id
    assert environment["WANDB_RESUME"] == "allow"
    untracked = flat_config(resolve("fast", trainer="verl", track=[]))
    assert untracked["trainer.logger"] == ["console", "file"]
    assert not [key for key in untracked if "WANDB" in key]


def test_the_logger_of_verl_and_track_are_one_setting() -> None:
    given = parse_overrides(["trainer.logger=[console,file,wandb,swanlab]"])
    config = resolve("fast", trainer="verl", verl=given)
    assert config.track == ["wandb", "swanlab"]
    assert flat_config(config)["trainer.logger"] == ["console", "file", "wandb", "swanlab"]
    assert resolve("fast", trainer="verl", verl=given, track=["swanlab", "wandb"]).track == ["wandb", "swanlab"]
    with pytest.raises(ConfigError, match="one setting"):
        resolve("fast", trainer="verl", verl=given, track=["tensorboard"])


def test_swanlab_gets_every_step_and_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "local")
    monkeypatch.chdir(tmp_path)
    run = _run_dir(tmp_path)
    check_trackers(["swanlab"])
    with open_trackers(resolve("fast", track=["swanlab"]), run, first_step=0) as log:
        for line in LINES:
            log(line)
    files = [path for path in (run.path / "swanlab").rglob("*") if path.is_file()]
    assert any(b"validation/accuracy" in path.read_bytes() for path in files)
    assert any(b"tasks_per_step" in path.read_bytes() for path in files)


def test_a_missing_login_is_said_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("json" if name == "swanlab" else name))
    with pytest.raises(ConfigError, match="--track swanlab: nobody is logged in: run swanlab login"):
        check_trackers(["swanlab"])
    (tmp_path / ".netrc").write_text("machine api.swanlab.cn login x password y\n")
    check_trackers(["swanlab"])
