"""A real run of the local trainer, killed and resumed again and again; each step is trained once."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import external_processes
import pandas as pd
import programs

from chaos.processes import END_S, Process, Processes
from chaos.tally import Tally
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.store.health import check_store

__all__ = ["check_run", "finish", "resume", "run"]

_STEPS = 10_000
_LONGEST_S = 15.0


def run(folder: Path, seconds: float, rng: random.Random, tally: Tally) -> None:
    """Kill or stop the trainer, resume it, for ``seconds``; then let it finish one more step."""
    end = time.monotonic() + seconds
    with Processes(folder, tally) as processes:
        port = external_processes.free_port()
        address = f"http://127.0.0.1:{port}"
        processes.fork("store of a real run", external_processes.store, str(folder / "store.db"), port)
        check_store(address, timeout_s=END_S)
        processes.fork("runner of a real run", external_processes.runner, address, 4, "langgraph")
        config = resolve(
            "fast",
            external_store_address=address,
            steps=_STEPS,
            tasks_per_step=2,
            group_size=2,
            n_runners=0,
            val_tasks=1,
            checkpoint_every=1,
        )
        found = RunDir.create(str(folder), backend="langgraph", domain="spider", config=config.to_dict())
        while not tally.counts["runs resumed"] or time.monotonic() < end:
            trainer = resume(processes, found.path)
            tally.add("runs resumed")
            time.sleep(rng.uniform(0, min(_LONGEST_S, seconds)))
            if not processes.check_running(trainer):
                continue
            if rng.random() < 0.7:
                processes.kill(trainer)
            else:
                processes.stop(trainer)
        if (last := finish(processes, found, tally)) is not None:
            check_run(found, last, tally)


def finish(processes: Processes, found: RunDir, tally: Tally) -> int | None:
    """Let the run do one step more; returns that step, None if it cannot."""
    last = max((line["step"] for line in found.metrics()), default=0)
    trainer = resume(processes, found.path, "--steps", str(last + 1))
    deadline = time.monotonic() + END_S
    while trainer.status is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if trainer.status is None:
        tally.fault("hangs", f"the resumed run does not finish step {last + 1} within {END_S:g} s")
        processes.kill(trainer)
    elif trainer.status != 0 and "nothing was trained" not in trainer.output:  # by rewards that are all equal
        processes.check_running(trainer)
    else:
        processes.kill(trainer)  # searches its stderr
        return last + 1
    return None


def resume(processes: Processes, run_dir: Path, *options: str) -> Process:
    """The process of a trainer that continues the run."""
    command = ("-m", "groundwire.train.run", "--resume", str(run_dir), *options)
    return processes.fork("trainer of a real run", programs.run_command, command)


def check_run(found: RunDir, steps: int, tally: Tally) -> None:
    """Each step has its metrics and its rollouts once."""
    numbers = [line["step"] for line in found.metrics()]
    for number, times in Counter(numbers).items():
        if times > 1:
            tally.fault("trained twice", "step of a real run", f"step {number}, {times} times")
    for number in sorted({*range(steps + 1)} - {*numbers}):
        tally.fault("lost", "step of a real run", f"step {number}")
    files = sorted((found.path / "rollouts").glob("step-*.parquet"))
    ids = Counter(each for file in files for each in pd.read_parquet(file, columns=["rollout_id"])["rollout_id"])
    for rollout_id, times in ids.items():
        if times > 1:
            tally.fault("trained twice", "rollout of a real run", f"{rollout_id}, {times} times")
    tally.add("steps of a real run", len(numbers) - 1)
