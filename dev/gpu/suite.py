"""Runs the programs of the GPU suite with a time limit each; their output goes to logs, their results to one file."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from benchmarks._results import read_lines

from groundwire.tools.startup import child_python_path
from groundwire.train.policy.pretrained.locate import find_model

__all__ = ["MARK", "Suite", "gpu_names", "last_line", "marked_processes", "separate_gpus", "step_figures", "steps_of"]

MARK = "GROUNDWIRE_SUITE"
"""Environment variable that every process of a program inherits, even after its parent has ended (Ray's, vLLM's)."""
_ROOT = Path(__file__).parents[2]
_WARM_UP = 2  # steps that compile and fill caches
_VERL_METRICS = {
    "step_s": "timing_s/step",
    "gen_s": "timing_s/gen",
    "old_log_prob_s": "timing_s/old_log_prob",
    "update_actor_s": "timing_s/update_actor",
    "update_weights_s": "timing_s/update_weights",
    "tokens_per_s_per_gpu": "perf/throughput",
    "response_length": "response_length/mean",
    "prompt_length": "prompt_length/mean",
    "rollout_logprob_diff": "training/rollout_probs_diff_mean",
    "rollout_s_mean": "rollouts/seconds_mean",
    "rollout_s_max": "rollouts/seconds_max",
    "dropped": "rollouts/dropped_total",
    "peak_gpu_gb": "actor/perf/max_memory_allocated_gb",
}


class Suite:
    """The options, the folder for everything that is written, and the results so far (``results.json``)."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out).resolve()
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        self._file = self.out / "results.json"
        self.results: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.model = str(find_model(options.model or "starter").resolve())
        self._programs: list[subprocess.Popen[bytes]] = []
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End all programs, which have sessions of their own, and start no more."""
        self._stopped.set()
        for process in self._programs:
            if process.poll() is None:
                process.terminate()

    def write(self) -> None:
        """Write the results so far."""
        self._file.write_text(json.dumps(self.results, indent=2) + "\n")

    def start(
        self, name: str, command: Sequence[str], *, mark: str = "", variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a Python module with arguments; its output goes to a log. No model hub is used.

        ``variables`` are further ones of its environment.

        Raises ``RuntimeError`` after :meth:`stop`.
        """
        if self._stopped.is_set():
            raise RuntimeError("the suite was stopped")
        print(f"[{name}] {' '.join(command)}", flush=True)
        environment = {
            "PYTHONPATH": child_python_path(_ROOT),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            MARK: mark,
            **(variables or {}),
        }
        with open(self.log(name), "w") as log:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, cwd=_ROOT,
                env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        self._programs.append(process)
        return process

    def log(self, name: str) -> Path:
        """The log of a program."""
        return self.out / "logs" / f"{name}.log"

    def run(
        self,
        name: str,
        command: Sequence[str],
        limit_s: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Run a program to its end. At the time limit it is terminated, and killed 60 s later."""
        started = reported = time.monotonic()
        limit_s = limit_s or self.options.limit
        process = self.start(name, command, variables=variables)
        while process.poll() is None and time.monotonic() - started < limit_s and not self._stopped.wait(1):
            if time.monotonic() - reported > 30:
                reported = time.monotonic()
                print(f"[{name}] {reported - started:.0f} s: {last_line(self.log(name))}", flush=True)
        timed_out = process.poll() is None
        if timed_out:
            process.terminate()  # not SIGINT, which programs ignore if the suite is a shell's background job
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        code, seconds = process.wait(), round(time.monotonic() - started, 1)
        print(f"[{name}] {'timed out' if timed_out else f'exit {code}'} after {seconds} s", flush=True)
        if code:
            lines = self.log(name).read_text(errors="replace").splitlines()[-15:]
            print("".join(f"    {line}\n" for line in lines), flush=True)
        ended = {"exit": code, "timed_out": timed_out, "seconds": seconds}
        return ended | ({"last_line": last_line(self.log(name))} if code else {})

    def train(
        self,
        name: str,
        arguments: Sequence[str],
        limit_s: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> tuple[dict[str, Any], Path | None]:
        """Run ``train.run``; returns its result and the run directory."""
        runs = self.out / "runs" / name
        known = set(runs.glob("2*"))
        command = ["-m", "groundwire.train.run", "--output-dir", str(runs), *arguments]
        result = self.run(name, command, limit_s, variables)
        folder = max(set(runs.glob("2*")) - known, default=None)
        if folder is not None and (folder / "summary.json").exists():
            result["summary"] = json.loads((folder / "summary.json").read_text())
            result["figures"] = step_figures(folder)
        return result, folder

    def resume(self, name: str, folder: Path) -> dict[str, Any]:
        """Resume a run for one more step."""
        steps = str(max(steps_of(folder), default=0) + 1)
        result = self.run(name, ["-m", "groundwire.train.run", "--resume", str(folder), "--steps", steps])
        return {**result, "steps_in_metrics": steps_of(folder)}

    def evaluate(
        self, name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> tuple[dict[str, Any], Path | None]:
        """Run ``train.evaluate`` with the embedded server; returns its result and the evaluation's folder."""
        folder = self.out / "evaluations" / name
        command = ["-m", "groundwire.train.evaluate", "--device", self.options.device, "--output-dir", str(folder)]
        result = self.run(name, [*command, *arguments], variables=variables)
        made = sorted(folder.glob("2*/evaluation.json"))
        return result, made[-1].parent if made else None


def step_figures(folder: Path) -> dict[str, Any]:
    """Means over a run's steps after the first two, or over all steps if those lack a figure: its speed, with either
    trainer, and verl's own metrics. A run of verl alone has only these.
    """
    logged, written = (
        {line["step"]: line for line in read_lines(folder / name)} for name in ("verl.jsonl", "metrics.jsonl")
    )
    steps = [
        _figures_of(written.get(step, {}), logged.get(step, {}).get("data", {}))
        for step in sorted(logged.keys() | written.keys())
        if step > 0
    ]
    if len(steps) <= _WARM_UP:
        return {}
    means: dict[str, Any] = {"steps": len(steps) - _WARM_UP}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [[step[name] for step in part if name in step] for part in (steps[_WARM_UP:], steps)]
        means[name] = round(mean(values[0] or values[1]), 5)
    return {**means, **(written[max(written)].get("machine", {}) if written else {})}


def _figures_of(line: Mapping[str, Any], logged: Mapping[str, Any]) -> dict[str, float]:
    verls = {name: logged[key] for name, key in _VERL_METRICS.items() if key in logged}
    counts = {name: line[name] for name in ("tokens_computed", "tokens_trained") if name in line}
    seconds = line.get("seconds", {})
    own = {"step_s": sum(seconds.values()), "update_s": seconds["update"]} if seconds and not logged else {}
    return {**own, **verls, **counts, **line.get("speed", {})}


def steps_of(folder: Path) -> list[int]:
    """The steps in a run's metrics."""
    return [line["step"] for line in read_lines(folder / "metrics.jsonl")]


def marked_processes(mark: str) -> list[str]:
    """Running processes with this :data:`MARK`, as process id and shortened command."""
    found = []
    for process in psutil.process_iter(["pid", "environ", "cmdline"]):
        if (process.info["environ"] or {}).get(MARK) == mark:  # None for other users' processes
            program, *arguments = process.info["cmdline"] or [""]
            found.append(f"{process.info['pid']} {' '.join([Path(program).name, *arguments])[:60]}")
    return sorted(found)


def last_line(log: Path) -> str:
    """The last line of a program's output."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][-200:] if lines else ""


def gpu_names() -> list[str]:
    """The GPUs that torch finds."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def separate_gpus() -> list[str]:
    """verl's settings for training and sampling on half of the GPUs each."""
    half = len(gpu_names()) // 2
    if not half:
        raise ValueError("separate_async needs two GPUs or more")
    rollout = "actor_rollout_ref.rollout"
    return [
        f"trainer.n_gpus_per_node={half}",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node={half}",
        f"{rollout}.checkpoint_engine.backend=nccl",
    ]
