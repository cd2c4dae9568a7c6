"""A run directory survives a kill at any moment: a file with its final name is complete."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from programs import ROOT
from safetensors.torch import save_file

from groundwire.tools.errors import machine_error
from groundwire.train.artifacts import run_dir
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir, RunDirError, new_folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, backend="b", domain="d", config={"steps": 3})


def _step(run: RunDir, step: int) -> None:
    run.write_rows(step, [{"step": step, "reward": 1.0}])
    run.append_metrics({"step": step})
    with run.checkpoints.write(step) as folder:
        (folder / "weights").write_text(str(step))


def test_latest_points_at_the_newest_run_with_rollouts(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path, backend="b", domain="d", config={})
    assert not (tmp_path / "latest").is_symlink()
    _step(first, 1)
    second = RunDir.create(tmp_path, backend="b", domain="d", config={})
    assert first.path != second.path
    assert RunDir.open(tmp_path / "latest").path == first.path.resolve()
    _step(second, 1)
    _step(first, 2)
    assert RunDir.open(tmp_path / "latest").path == second.path.resolve()


def test_a_first_write_that_failed_does_not_keep_latest_from_moving(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="b", domain="d", config={})
    (run.path / "rollouts").mkdir()
    _step(run, 1)
    assert RunDir.open(tmp_path / "latest").path == run.path.resolve()


def test_a_run_with_only_verls_tasks_is_empty(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="b", domain="d", config={})
    (run.path / "tasks").mkdir()
    (run.path / "tasks" / "train.parquet").write_text("x")
    assert run.is_empty()
    (run.path / "error.txt").write_text("x")
    assert not run.is_empty()


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(tmp_path: Path) -> None:
    def fail(run: RunDir, steps: int) -> None:
        with run.lock():
            run.rewind()
            for step in range(1, steps + 1):
                _step(run, step)
            raise OSError("port in use")

    with pytest.raises(OSError, match="port in use"):
        fail(RunDir.create(tmp_path, backend="b", domain="d", config={}), 0)
    assert not list(tmp_path.iterdir())
    run = RunDir.create(tmp_path, backend="b", domain="d", config={})
    for again in (run, RunDir.open(run.path)):
        with pytest.raises(OSError, match="port in use"):
            fail(again, 1)
        assert run.checkpoints.paths()
    killed = RunDir.create(tmp_path, backend="c", domain="d", config={})  # before its first step
    with pytest.raises(OSError, match="port in use"):
        fail(RunDir.open(killed.path), 0)
    assert killed.config() == {}  # settings are somebody's: who resumed it did not make it


_HOLD = """
import sys
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
try:
    with RunDir.open(sys.argv[1]).lock():
        print("held", flush=True)
        sys.stdin.read()
except RunDirError as error:
    print(error, flush=True)
"""


def _holder(run: RunDir) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _HOLD, str(run.path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_a_locked_run_is_refused_until_the_locking_process_ends_in_any_way(run: RunDir) -> None:
    _step(run, 1)
    with run.lock(), _holder(run) as second:
        printed = second.communicate()[0]
    assert f"is in use by process {os.getpid()} on " in printed
    assert len(printed.splitlines()) == 1
    with _holder(run) as third:
        assert third.stdout is not None
        assert third.stdout.readline() == "held\n"
        with pytest.raises(RunDirError, match=f"process {third.pid} on"), run.lock():
            pass
        third.send_signal(signal.SIGKILL)
        third.wait()
    with run.lock():
        pass


def test_a_forked_child_does_not_keep_the_lock(run: RunDir) -> None:
    """A run's runners and agents may outlive it for a while."""
    _step(run, 1)
    with run.lock():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)
    with _holder(run) as other:
        printed = other.communicate()[0]
    os.close(writing)
    os.waitpid(child, 0)
    assert printed == "held\n"


def test_settings_are_read_as_written(run: RunDir) -> None:
    assert RunDir.open(run.path).config() == {"steps": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"steps": 3}', "an older version of groundwire (format 0"), ('{"format": 99}', "another version of groundwire")],
)
def test_a_folder_of_another_version_is_refused(run: RunDir, text: str, message: str) -> None:
    (run.path / "config.json").write_text(text)
    with pytest.raises(RunDirError, match=re.escape(message)):
        RunDir.open(run.path)


@pytest.mark.parametrize("text", ['{"steps": 3', "[1, 2]", "3", "\x00\xff"])
def test_an_error_about_damaged_settings_names_the_file(run: RunDir, text: str) -> None:
    (run.path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunDamagedError, match=r"config\.json is damaged"):
        run.config()


@pytest.mark.parametrize("text", ['{"step": 1, "rew', "[3]", '{"reward": 1}', "\xff\xfe"])
def test_a_damaged_line_of_the_metrics_is_an_error_but_an_incomplete_last_line_is_not(run: RunDir, text: str) -> None:
    _step(run, 1)
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(text.encode("latin-1"))
    assert [line["step"] for line in run.metrics()] == [1]
    run.append_metrics({"step": 3})
    _step(run, 4)
    with pytest.raises(RunDamagedError, match=r"metrics\.jsonl, line 2 cannot be read"):
        run.metrics()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"config\.json"):
        RunDir.open(tmp_path)


def test_rewinding_deletes_everything_after_the_newest_checkpoint(run: RunDir) -> None:
    for step in (1, 2):
        _step(run, step)
    run.write_rows(3, [{"step": 3, "reward": 0.0}])
    run.append_metrics({"step": 3})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # killed in the middle of a line
    assert run.rewind() == 2
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert sorted(part.name for part in (run.path / "rollouts").iterdir()) == [
        "step-00001-train.parquet",
        "step-00002-train.parquet",
    ]


def test_runners_that_were_lost_in_steps_that_are_done_again_still_count(run: RunDir) -> None:
    _step(run, 1)
    for step in (2, 3):
        run.append_metrics({"step": step, "runners_lost": step})
    assert run.rewind() == 1
    assert [(line["step"], line["runners_lost"]) for line in run.metrics()] == [(1, 5)]
    run.append_metrics({"step": 2, "runners_lost": 1})
    assert run.rewind() == 1
    assert [line["runners_lost"] for line in run.metrics()] == [6]


def test_a_failed_checkpoint_leaves_the_last_one(run: RunDir) -> None:
    _step(run, 1)

    def write_half() -> None:
        with run.checkpoints.write(2) as folder:
            (folder / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    [checkpoint] = run.checkpoints.paths()
    assert (checkpoint / "weights").read_text() == "1"
    assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step-00001"]


def test_other_files_are_not_taken_for_checkpoints(run: RunDir) -> None:
    _step(run, 2)
    for name in ("step-abc", "step-00009-copy", "other", ".step-00007.part"):
        (run.path / "checkpoints" / name).mkdir()
    (run.path / "checkpoints" / "step-00008").write_text("a file")
    (run.path / "rollouts" / "step-abc-train.parquet").write_text("somebody's")
    _step(run, 100_000)
    assert [folder.name for folder in run.checkpoints.paths()] == ["step-00002", "step-100000"]
    assert run.rewind() == 100_000
    assert (run.path / "rollouts" / "step-abc-train.parquet").exists()


def test_a_damaged_checkpoint_is_renamed_and_ignored(run: RunDir) -> None:
    for step in (1, 2):
        _step(run, step)
    aside = run.checkpoints.rename_damaged(run.checkpoints.paths()[-1])
    assert (aside / "weights").read_text() == "2"
    assert run.rewind() == 1
    for step in (2, 3, 4):
        _step(run, step)
    assert [folder.name for folder in run.checkpoints.paths()] == ["step-00003", "step-00004"]
    assert aside.exists()


def test_the_newest_two_checkpoints_are_kept(run: RunDir) -> None:
    for step in (1, 2, 3):
        _step(run, step)
    assert [c.name for c in run.checkpoints.paths()] == ["step-00002", "step-00003"]


def test_rollouts_of_all_steps_are_merged_into_one_file(run: RunDir) -> None:
    run.write_rows(1, [{"step": 1, "reward": None, "calls": []}])
    run.write_rows(2, [{"step": 2, "reward": 0.5, "calls": [{"agent": "a", "ids": [1, 2]}]}])
    run.merge_rollouts()
    rows = pq.read_table(run.path / "rollouts.parquet").to_pylist()
    assert [(row["step"], row["reward"], row["calls"]) for row in rows] == [
        (1, None, []),
        (2, 0.5, [{"agent": "a", "ids": [1, 2]}]),
    ]


def test_rollouts_are_read_from_the_files_of_steps_or_from_the_merged_file(run: RunDir) -> None:
    with pytest.raises(RunDirError, match="not finished a step"):
        run.rollouts()
    _step(run, 1)
    _step(run, 2)
    assert [(rollout.step, rollout.outcome.reward) for rollout in run.rollouts(["step"])[0]] == [(1, None), (2, None)]
    run.merge_rollouts()
    for part in (run.path / "rollouts").iterdir():
        part.unlink()
    rollouts, unreadable = run.rollouts(["step", "reward"])
    assert [(rollout.step, rollout.outcome.reward) for rollout in rollouts] == [(1, 1.0), (2, 1.0)]
    assert unreadable == []


def test_an_unreadable_file_of_rollouts_is_reported_and_the_others_are_read(run: RunDir) -> None:
    _step(run, 1)
    _step(run, 2)
    part = run.path / "rollouts" / "step-00001-train.parquet"
    part.write_bytes(part.read_bytes()[:100])
    rollouts, [sentence] = run.rollouts(["step"])
    assert [rollout.step for rollout in rollouts] == [2]
    assert sentence.startswith("step-00001-train.parquet cannot be read")
    assert run.merge_rollouts() == [sentence]
    assert pq.read_table(run.path / "rollouts.parquet").to_pylist() == [{"step": 2, "reward": 1.0}]
    (run.path / "rollouts" / "step-00002-train.parquet").write_bytes(b"")
    assert len(run.merge_rollouts()) == 2
    with pytest.raises(RunDamagedError, match=r"has no rollouts: step-00001-train\.parquet cannot be read"):
        run.rollouts()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "rollouts", "checkpoints", "checkpoints/step-00001"])
def test_a_link_out_of_the_run_is_refused_before_anything_is_changed(run: RunDir, tmp_path: Path, name: str) -> None:
    for step in range(4):
        _step(run, step)
    outside = tmp_path / "outside"
    (run.path / name).rename(outside) if (run.path / name).exists() else outside.write_text("theirs")
    (run.path / name).symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in (*tmp_path.rglob("*"), *outside.rglob("*"))}
    with pytest.raises(RunDirError, match=f"{name} is a link out of the run, to {outside}"), run.lock():
        pass
    assert before == {path: path.stat().st_mtime_ns for path in (*tmp_path.rglob("*"), *outside.rglob("*"))}


def test_a_link_within_the_run_is_no_harm(run: RunDir) -> None:
    _step(run, 1)
    (run.path / "model").symlink_to("checkpoints/step-00001")
    with run.lock():
        pass


def test_a_temporary_file_that_is_a_link_is_replaced(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("theirs")
    (run.path / ".config.json.part").symlink_to(tmp_path / "outside")
    run.write_config({"steps": 4})
    assert (tmp_path / "outside").read_text() == "theirs"
    assert run.config() == {"steps": 4}


_LIMITED = """
import resource, sys
from groundwire.train.artifacts.run_dir import RunDir
run = RunDir.open(sys.argv[1])
size = (run.path / "metrics.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, resource.RLIM_INFINITY))
for write in (run.append_metrics, run.append_rollout_metrics):
    try:
        write({"step": 2})
    except OSError as error:
        print(error.filename)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
run.append_metrics({"step": 2})
"""


def test_a_line_that_does_not_fit_leaves_no_part_of_it(run: RunDir) -> None:
    _step(run, 1)
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(run.path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{run.path}/metrics.jsonl\n"
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert (run.path / "rollouts.jsonl").read_text() == '{"step": 2}\n'


def test_a_run_has_a_folder_of_its_own_and_one_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"no folder can be made in .*/file \(Not a directory\): give another"):
        new_folder(tmp_path / "file", "b-d")

    class At(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 1, 1)

    monkeypatch.setattr(run_dir, "datetime", At)
    assert len({new_folder(tmp_path, "b-d") for _ in range(120)}) == 120


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_loses_nothing_and_is_named_whatever_library_writes(small_disk: Path) -> None:
    run = RunDir.create(small_disk, backend="b", domain="d", config={"steps": 3})
    _step(run, 1)
    weights = {"w": torch.zeros(100_000)}
    for save in (save_file, torch.save):
        with pytest.raises(OSError, match="No space left") as raised, run.checkpoints.write(2) as folder:
            save(weights, folder / "weights")
        assert raised.value.errno == errno.ENOSPC
        assert "no space is left on the disk of " in machine_error(raised.value)
        del raised  # which holds the file open
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    for write in (run.append_metrics, lambda line: run.write_config({**line, "long": "x" * 9000})):
        with pytest.raises(OSError, match="No space left"):
            write({"step": 2, "failures": {"x" * 9000: 1}})
    with run.lock():  # a resumed run says what is wrong
        assert [line["step"] for line in run.metrics()] == [1]
    assert run.config() == {"steps": 3}
    (small_disk / "filler").unlink()
    _step(run, 2)
    assert [path.name for path in run.checkpoints.paths()] == ["step-00001", "step-00002"]
    assert not [path for path in small_disk.rglob(".*") if path.name != ".lock"]
