"""A run's folder survives a kill at any moment: what is under a final name is complete."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from train.rundir import RunDir, RunDirError


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, backend="b", domain="d", config={"steps": 3})


def _step(run: RunDir, step: int) -> None:
    run.write_rollouts(step, [{"step": step, "reward": 1.0}])
    run.append_metrics({"step": step})
    with run.new_checkpoint(step) as folder:
        (folder / "weights").write_text(str(step))


def test_latest_points_at_the_newest_run_that_has_something(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path, backend="b", domain="d", config={})
    assert not (tmp_path / "latest").is_symlink()
    _step(first, 1)
    second = RunDir.create(tmp_path, backend="b", domain="d", config={})
    assert first.path != second.path
    assert RunDir.open(tmp_path / "latest").path == first.path.resolve()
    _step(second, 1)
    _step(first, 2)
    assert RunDir.open(tmp_path / "latest").path == second.path.resolve()


def test_the_settings_come_back(run: RunDir) -> None:
    assert RunDir.open(run.path).config() == {"steps": 3}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"config\.json"):
        RunDir.open(tmp_path)


def test_what_lies_beyond_the_newest_checkpoint_is_dropped(run: RunDir) -> None:
    for step in (1, 2):
        _step(run, step)
    run.write_rollouts(3, [{"step": 3, "reward": 0.0}])
    run.append_metrics({"step": 3})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # killed in the middle of a line
    assert run.rewind() == 2
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert sorted(part.name for part in (run.path / "rollouts").iterdir()) == [
        "step-00001-train.parquet",
        "step-00002-train.parquet",
    ]


def test_a_checkpoint_that_could_not_be_written_leaves_the_last_one(run: RunDir) -> None:
    _step(run, 1)

    def write_half() -> None:
        with run.new_checkpoint(2) as folder:
            (folder / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    [checkpoint] = run.checkpoints()
    assert (checkpoint / "weights").read_text() == "1"
    assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step-00001"]


def test_the_newest_two_checkpoints_are_kept(run: RunDir) -> None:
    for step in (1, 2, 3):
        _step(run, step)
    assert [c.name for c in run.checkpoints()] == ["step-00002", "step-00003"]


def test_rollouts_of_all_steps_become_one_file(run: RunDir) -> None:
    run.write_rollouts(1, [{"step": 1, "reward": None, "calls": []}])
    run.write_rollouts(2, [{"step": 2, "reward": 0.5, "calls": [{"agent": "a", "ids": [1, 2]}]}])
    run.merge_rollouts()
    rows = pq.read_table(run.path / "rollouts.parquet").to_pylist()
    assert [(row["step"], row["reward"], row["calls"]) for row in rows] == [
        (1, None, []),
        (2, 0.5, [{"agent": "a", "ids": [1, 2]}]),
    ]


def test_rollouts_are_read_while_the_run_goes_on_and_when_only_the_whole_file_is_left(run: RunDir) -> None:
    with pytest.raises(RunDirError, match="not finished a step"):
        run.rollouts()
    _step(run, 1)
    _step(run, 2)
    assert run.rollouts(["step"]) == ([{"step": 1}, {"step": 2}], [])
    run.merge_rollouts()
    for part in (run.path / "rollouts").iterdir():
        part.unlink()
    assert run.rollouts()[0] == [{"step": 1, "reward": 1.0}, {"step": 2, "reward": 1.0}]


def test_a_damaged_file_of_rollouts_is_named_and_the_others_are_read(run: RunDir) -> None:
    _step(run, 1)
    _step(run, 2)
    part = run.path / "rollouts" / "step-00001-train.parquet"
    part.write_bytes(part.read_bytes()[:100])
    rows, [sentence] = run.rollouts()
    assert [row["step"] for row in rows] == [2]
    assert sentence.startswith("step-00001-train.parquet cannot be read")
    (run.path / "rollouts" / "step-00002-train.parquet").write_bytes(b"")
    with pytest.raises(RunDirError, match=r"has no rollouts: step-00001-train\.parquet cannot be read"):
        run.rollouts()
