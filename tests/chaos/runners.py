"""A real run with runner processes of its own, of which any may be killed, stopped or frozen, as the trainer may.

A lost runner is said and started again, all processes end with their trainer, and no rollout is lost or trained twice.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import external_processes
import programs

from chaos.processes import Process, Processes
from chaos.tally import Tally
from chaos.training import check_run, finish, resume
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve

__all__ = ["check_ended", "descendants", "disturb", "run", "wait_for_all"]

_RUNNERS = 3
_PAUSE_S, _SAID_S, _END_S, _ALL_S = 4.0, 30.0, 5.0, 120.0
"""Between two kills; in which a loss is said, all end with their trainer, and all runners are there again."""
_LOST, _ALL_LOST, _RUNNER = "has ended, with", "have ended again and again", "train.runner"


def run(folder: Path, seconds: float, rng: random.Random, tally: Tally) -> None:
    """Kills, stops and freezes for ``seconds``; then the run has all of its runners again and finishes a step."""
    end = time.monotonic() + seconds
    with Processes(folder, tally) as processes:
        config = resolve(
            "fast",
            backend="custom",
            agent=f"{external_processes.__file__}:ask",
            steps=10_000,
            tasks_per_step=3,
            group_size=4,
            n_runners=2 * _RUNNERS,
            runner_processes=_RUNNERS,
            rollout_process=rng.choice(["fork", "spawn", "off"]),
            retries=3,
            val_tasks=1,
            checkpoint_every=1,
        )
        found = RunDir.create(str(folder), backend="custom", domain="spider", config=config.to_dict())
        trainer = resume(processes, found.path)
        while time.monotonic() < end:
            time.sleep(rng.uniform(0, _PAUSE_S))
            if trainer.status is not None and _ALL_LOST in trainer.output:
                tally.add("runs that ended as they lost all runners again and again")
                processes.kill(trainer)
                trainer = resume(processes, found.path)
            elif not processes.check_running(trainer) or rng.random() < 0.05:
                family = descendants(trainer.pid)
                processes.kill(trainer)
                check_ended(family, tally)
                trainer = resume(processes, found.path)
            else:
                disturb(trainer, rng, tally)
        wait_for_all(trainer, tally)
        family = descendants(trainer.pid)
        processes.stop(trainer, count=False)
        check_ended(family, tally)
        if (last := finish(processes, found, tally)) is not None:
            check_run(found, last, tally)


def disturb(trainer: Process, rng: random.Random, tally: Tally) -> None:
    """Kill, stop or freeze a runner, its guard, or what a runner has started."""
    guards = [pid for pid in _children(trainer.pid) if _RUNNER in _command(pid)]
    if not (family := sorted({*guards}.union(*map(descendants, guards)))):
        return
    victim, how = rng.choice(family), rng.choice([signal.SIGKILL] * 8 + [signal.SIGTERM, signal.SIGSTOP])
    is_runner, losses = _RUNNER in _command(victim), trainer.output.count(_LOST)
    with suppress(ProcessLookupError):
        os.kill(victim, how)
        tally.add("freezes" if how == signal.SIGSTOP else "kills")
    if how == signal.SIGSTOP:
        time.sleep(rng.uniform(0, _PAUSE_S))
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    elif is_runner:
        tally.add("kills of runner processes")
        deadline = time.monotonic() + _SAID_S
        while trainer.status is None and trainer.output.count(_LOST) == losses:
            if time.monotonic() > deadline:
                tally.fault("lost", f"a runner whose loss is not said within {_SAID_S:g} s")
                return
            time.sleep(0.05)


def wait_for_all(trainer: Process, tally: Tally) -> None:
    """The run has as many runners as it was given again."""
    deadline = time.monotonic() + _ALL_S
    while trainer.status is None:
        commands = [_command(pid) for pid in _children(trainer.pid)]
        if (count := sum(_RUNNER in command for command in commands)) == _RUNNERS:
            return
        if time.monotonic() > deadline:
            tally.fault("lost", f"{_RUNNERS - count} of {_RUNNERS} runner processes are not started again")
            return
        time.sleep(0.1)


def check_ended(pids: Collection[int], tally: Tally) -> None:
    """All these have ended within a moment."""
    deadline = time.monotonic() + _END_S
    while left := [pid for pid in pids if programs.is_running(pid)]:
        if time.monotonic() > deadline:
            tally.fault("hangs", f"a process runs {_END_S:g} s after the end of its trainer", _command(left[0]))
            return
        time.sleep(0.02)


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    for child in _children(pid):
        found |= {child} | descendants(child)
    return found


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return programs.children(pid)
    return []


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
