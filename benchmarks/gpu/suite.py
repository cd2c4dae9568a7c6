"""Programs of the GPU suite: run with a time limit, their output into logs, their figures into one file."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

__all__ = [
    "MARK",
    "ROOT",
    "Suite",
    "environment",
    "figures",
    "last_line",
    "marked_processes",
    "read_json",
    "steps_of",
]

ROOT = Path(__file__).parents[1]
MARK = "LIGHTNING_ROD_SUITE"
"""A variable that all processes of a program inherit, Ray's and vLLM's too, whoever their parent becomes."""
_WARM_UP = 2  # steps that compile and fill caches; they are left out of every figure


class Suite:
    """The options, and what has been measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out).resolve()
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        self.file = self.out / "results.json"
        self.results: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    @property
    def model(self) -> str:
        """The model that every part trains: given, made here, or the toy."""
        if self.options.model:
            return str(Path(self.options.model).resolve())
        made = self.out / "model"
        return str(made) if (made / "config.json").exists() else str(ROOT / "train" / "local" / "starter")

    def run(self, name: str, command: Sequence[str], limit_s: float) -> dict[str, Any]:
        """Run a program, its output into a log; ended when its time is over, and killed where it does not end."""
        log = self.out / "logs" / f"{name}.log"
        print(f"[{name}] {' '.join(command)}", flush=True)
        started = time.monotonic()
        with open(log, "w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment(), start_new_session=True
            )
            said = 0.0
            while process.poll() is None and time.monotonic() - started < limit_s:
                time.sleep(1)
                if time.monotonic() - started > said + 30:
                    said = time.monotonic() - started
                    print(f"[{name}] {said:.0f} s: {last_line(log)}", flush=True)
            timed_out = process.poll() is None
            if timed_out:
                process.terminate()  # SIGINT would be ignored wherever this suite is a shell's background job
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        seconds = round(time.monotonic() - started, 1)
        code = process.wait()
        print(f"[{name}] {'timed out' if timed_out else f'exit {code}'} after {seconds} s", flush=True)
        if code:
            print("".join(f"    {line}\n" for line in log.read_text(errors="replace").splitlines()[-15:]), flush=True)
        return {"exit": code, "timed_out": timed_out, "seconds": seconds}

    def train(self, name: str, arguments: Sequence[str], limit_s: float) -> tuple[dict[str, Any], Path | None]:
        """``python -m train.run``; what became of it, and the run's folder."""
        runs = self.out / "runs" / name
        known = {path for path in runs.glob("*") if path.is_dir()}
        command = [sys.executable, "-m", "train.run", "--output-dir", str(runs), *arguments]
        result = self.run(name, command, limit_s)
        new = sorted(path for path in runs.glob("2*") if path.is_dir() and path not in known)
        folder = new[-1] if new else None
        if folder is not None and (folder / "summary.json").exists():
            result["summary"] = json.loads((folder / "summary.json").read_text())
            result["figures"] = figures(folder)
        return result, folder

    def resume(self, name: str, folder: Path) -> dict[str, Any]:
        """One step more of a run that is there."""
        steps = str(max(steps_of(folder), default=0) + 1)
        command = [sys.executable, "-m", "train.run", "--resume", str(folder), "--steps", steps]
        result = self.run(name, command, self.options.limit)
        return {**result, "steps_in_metrics": steps_of(folder)}

    def evaluate(self, name: str, asked: Sequence[str]) -> Path | None:
        """All validation questions, with the embedded server; the evaluation's folder."""
        folder = self.out / "evaluations" / name
        command = [sys.executable, "-m", "train.evaluate", "--device", "cuda", *asked, "--output-dir", str(folder)]
        self.run(name, command, self.options.limit)
        made = sorted(folder.glob("2*/evaluation.json"))
        return made[-1].parent if made else None

    def write(self) -> None:
        """Everything so far, as JSON and to be read."""
        self.file.write_text(json.dumps(self.results, indent=2) + "\n")
        lines = [f"# GPU suite: {self.results.get('machine', {})}", ""]
        for name, result in self.results.items():
            lines += [f"## {name}", "", "```json", json.dumps(result, indent=2), "```", ""]
        (self.out / "results.md").write_text("\n".join(lines))


def figures(folder: Path) -> dict[str, Any]:
    """What verl measured over the steps after the first two: means of seconds and tokens a second."""
    written = folder / "verl.jsonl"
    lines = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    steps = [line["data"] for line in lines if line["step"] > 0][_WARM_UP:]
    if not steps:
        return {}
    wanted = {
        "step_s": "timing_s/step",
        "gen_s": "timing_s/gen",
        "old_log_prob_s": "timing_s/old_log_prob",
        "update_actor_s": "timing_s/update_actor",
        "update_weights_s": "timing_s/update_weights",
        "tokens_per_s_per_gpu": "perf/throughput",
        "response_length": "response_length/mean",
        "prompt_length": "prompt_length/mean",
        "rollout_logprob_diff": "training/rollout_probs_diff_mean",
        "gpu_idle_fraction": "rollouts/gpu_idle_fraction",
        "rollout_s_mean": "rollouts/seconds_mean",
        "rollout_s_max": "rollouts/seconds_max",
        "dropped": "rollouts/dropped_total",
        "peak_gpu_gb": "actor/perf/max_memory_allocated_gb",
    }
    result = {name: round(mean(step[key] for step in steps), 4) for name, key in wanted.items() if key in steps[0]}
    return {"steps": len(steps), **result}


def steps_of(folder: Path) -> list[int]:
    """The steps that a run's metrics have a line of."""
    written = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in written.read_text().splitlines()] if written.exists() else []


def read_json(log: Path) -> Any:
    """The JSON at the end of a program's output, or what it said instead."""
    text = log.read_text(errors="replace")
    try:
        return json.loads(text[text.index("{") :])
    except ValueError:
        return text[-500:]


def environment() -> dict[str, str]:
    """That of every program: this checkout first, and no model hub."""
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def marked_processes(value: str) -> list[str]:
    """Running processes, by id and what they run, in whose environment :data:`MARK` is ``value``."""
    found = psutil.process_iter(["pid", "environ", "cmdline"])  # None for what it may not read
    marked = [each.info for each in found if (each.info["environ"] or {}).get(MARK) == value]
    return sorted(f"{info['pid']} {_short(info['cmdline'] or ())}" for info in marked)


def _short(command: Sequence[str]) -> str:
    """A program without its folder, however long that is, and the first of what it was given."""
    return " ".join([*(Path(program).name for program in command[:1]), *command[1:]])[:60]


def last_line(log: Path) -> str:
    """What a program said last."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][-200:] if lines else ""
