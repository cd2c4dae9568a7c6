"""An interrupted run keeps every complete step, and a resumed one continues as if it had not been interrupted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job_of
from programs import Program, run, until

from groundwire import domains
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.job.graceful_shutdown import GracefulShutdown
from groundwire.train.local.trainer import LocalTrainer

STEPS = 4
SMALL = {"tasks_per_step": 2, "group_size": 2, "val_tasks": 1}
"""Settings of a run that nobody interrupts."""


def _new_run(runs: Path) -> RunDir:
    """The run directory of a run without checkpoints before its end."""
    config = resolve(
        "fast",
        steps=STEPS,
        tasks_per_step=4,
        group_size=4,
        val_tasks=2,
        val_every=2,
        n_runners=16,
        agent_options={"max_turns": 1},
        checkpoint_every=10,
    )
    return RunDir.create(runs, backend="langgraph", domain="spider", config=config.to_dict())


def _interrupt(folder: RunDir, when: Callable[[], bool], number: int) -> str:
    program = Program("-m", "train.run", "--resume", str(folder.path))
    until(when, program)
    program.send_signal(number)
    program.send_signal(number)  # from the terminal, and again from the parent process
    stopped = program.wait(600)
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    return stopped.stderr


class _InterruptedValidation(ProgressCallback):
    def on_phase_start(self, name: str, total: int, unit: str = "rollouts") -> None:
        if name.startswith("validate"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_interrupted_run_keeps_every_complete_step(tmp_path: Path) -> None:
    """Once during sampling and once during a validation, which the resumed run adds."""
    folder = _new_run(tmp_path)
    message = _interrupt(folder, lambda: len(folder.metrics()) == 2, signal.SIGINT)
    first = int(folder.checkpoints.paths()[-1].name.removeprefix("step-"))
    assert f"the last checkpoint is of step {first}" in message
    assert [line["step"] for line in folder.metrics()] == list(range(first + 1))
    job = job_of(RunConfig(**folder.config()), domains.get("spider"))
    with GracefulShutdown() as shutdown:
        trainer = LocalTrainer(job, run=folder, callback=_InterruptedValidation(), shutdown=shutdown)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert [path.name for path in folder.checkpoints.paths()] == ["step-00001", "step-00002"]
    assert [line["step"] for line in folder.metrics()] == [0, 1, 2]
    assert "validation" not in folder.metrics()[-1]
    folder.write_config({**folder.config(), **SMALL})
    done = run("-m", "train.run", "--resume", str(folder.path))
    assert done.returncode == 0, done.stderr
    lines = folder.metrics()
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert ["validation" in line for line in lines] == [True, False, True, False, True]
    assert [path.name for path in folder.checkpoints.paths()] == ["step-00002", f"step-{STEPS:05d}"]
    state = torch.load(folder.checkpoints.paths()[-1] / "trainer.pt", weights_only=True)
    assert state["updates"] == sum(line["groups_used"] > 0 for line in lines[1:])


def test_a_step_without_metrics_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, domain = _new_run(tmp_path), domains.get("spider")
    append = RunDir.append_metrics

    def full(run: RunDir, line: Mapping[str, Any]) -> None:
        if line["step"] == 1:
            raise OSError("no space left")
        append(run, line)

    monkeypatch.setattr(RunDir, "append_metrics", full)
    config = RunConfig(**{**folder.config(), **SMALL})
    with pytest.raises(OSError, match="no space left"):
        LocalTrainer(job_of(config, domain), run=folder, callback=ProgressCallback()).train()
    assert [line["step"] for line in folder.metrics()] == [0]
    assert folder.checkpoints.paths() == []


def _update(done: list[str], signals: Callable[[], None]) -> None:
    with GracefulShutdown() as shutdown:
        with shutdown.critical_section("the update of step 3"):
            signals()
            done.append("update")
        done.append("more")


def test_a_critical_section_ends_before_the_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _update(done, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert done == ["update"]
    assert capsys.readouterr().err.count("stopping after the update of step 3") == 1


def test_a_second_signal_interrupts_a_critical_section(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 5
        os.kill(os.getpid(), signal.SIGINT)

    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _update(done, twice)
    assert done == []


def test_a_second_signal_is_immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with GracefulShutdown() as shutdown:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert not shutdown.immediate
        now[0] += 5
        with pytest.raises(KeyboardInterrupt), shutdown.critical_section("writing a checkpoint"):
            os.kill(os.getpid(), signal.SIGINT)
        assert shutdown.immediate


def _fails(shutdown: GracefulShutdown) -> None:
    with shutdown.critical_section("writing step 3"):
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("no space left")


def test_an_error_in_a_critical_section_replaces_the_interrupt() -> None:
    with GracefulShutdown() as shutdown:
        with pytest.raises(OSError, match="no space left"):
            _fails(shutdown)
        with shutdown.critical_section("writing a checkpoint"):
            pass


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with GracefulShutdown():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with GracefulShutdown():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
