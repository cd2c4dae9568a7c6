"""Runners of an external store that feed one GPU: ``python -m dev.gpu.runners --out FOLDER --runners 4,8,16``.

For each number: a durable store, as many runner processes, and the local trainer, all on this machine. One call per
rollout, random rewards and weights. Prints a line of JSON with medians of the steps after the first two: seconds of a
step, the share of it in which the GPU waits, CPU seconds of all runners per rollout, and processors that the store and
the trainer take. ``--batch 250`` makes steps of 2,000 rollouts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from benchmarks._processes import our_store, running, store_process
from benchmarks._results import read_lines

from dev.gpu.random_model import save_random_model

_SIZE = 8
_WARM_UP = 2


def _cpu_s(processes: list[psutil.Process]) -> float:
    """CPU seconds of processes and of those below them, ended ones included."""
    total = 0.0
    for process in processes:
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            total += times.user + times.system
        times = process.cpu_times()
        total += times.children_user + times.children_system
    return total


def measure(number: int, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures with this number of runner processes."""
    out = options.out / f"runners-{number}"
    out.mkdir(parents=True)
    rollouts = options.batch * _SIZE
    data = ["--data-dir", options.spider] if options.spider else []
    chosen = ["--agent", f"dev.gpu.agents:{'once_full' if options.spider else 'once'}"]
    chosen += ["--reward", "dev.gpu.agents:coin", *data]
    groundwire = [sys.executable, "-m"]
    with ExitStack() as stack:
        address, store = stack.enter_context(store_process(our_store(out)))
        runner = [*groundwire, "groundwire.train.runner", "--external-store-address", address, *chosen]
        runner += ["--n-runners", str(-(-rollouts // number))]
        runners = stack.enter_context(running(*[runner] * number))
        command = [*groundwire, "groundwire.train.run", "--output-dir", str(out / "run"), "--model", model, *chosen]
        command += ["--trainer", "local", "--external-store-address", address, "--n-runners", "0"]
        command += ["--device", options.device, "--config", "hf", "--steps", str(options.steps)]
        command += ["--tasks-per-step", str(options.batch), "--max-tokens", str(options.reply), "--val-every", "0"]
        command += ["--val-tasks", "8", "--max-model-len", "3072", "--minibatches", "1", "--credit", "broadcast"]
        command += [*options.settings]
        with open(out / "log", "w") as log:
            trainer = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        own = psutil.Process(trainer.pid)
        marks: list[tuple[int, float, float, float, float]] = []
        ends = time.monotonic() + options.limit
        while trainer.poll() is None:
            steps = sum(line["step"] > 0 for path in out.glob("run/2*/metrics.jsonl") for line in read_lines(path))
            if not marks or steps > marks[-1][0]:
                try:
                    marks.append((steps, time.monotonic(), _cpu_s(runners), _cpu_s([store]), _cpu_s([own])))
                except psutil.NoSuchProcess:
                    break
            if time.monotonic() > ends:
                trainer.terminate()
                break
            time.sleep(0.1)
        code = trainer.wait(60)
    figures: dict[str, Any] = {"runners": number, "rollouts_per_step": rollouts, "exit": code}
    lines = [line for path in out.glob("run/2*/metrics.jsonl") for line in read_lines(path) if line["step"] > 0]
    counted = [mark for mark in marks if mark[0] >= _WARM_UP] or marks[-2:]
    if len(counted) > 1:
        first, last = counted[0], counted[-1]
        wall_s, steps = last[1] - first[1], last[0] - first[0]
        figures |= {
            "wall_s_per_step": round(wall_s / steps, 2),
            "runner_cpu_s_per_rollout": round((last[2] - first[2]) / steps / rollouts, 4),
            "store_cpu_s_per_rollout": round((last[3] - first[3]) / steps / rollouts, 5),
            "processors": {
                name: round((last[place] - first[place]) / wall_s, 2)
                for place, name in ((2, "runners"), (3, "store"), (4, "trainer"))
            },
        }
    speeds = [line["speed"] for line in lines[_WARM_UP:] or lines if "speed" in line]
    numbers = [name for name, value in (speeds[0] if speeds else {}).items() if isinstance(value, int | float)]
    figures["speed"] = {name: round(median(speed[name] for speed in speeds), 4) for name in numbers}
    if code or not figures["speed"]:
        figures["log"] = (out / "log").read_text(errors="replace").splitlines()[-5:]
    return figures


def main() -> int:
    """Measure each number of runners; the exit status is the number of runs that failed."""
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.runners", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="new folder for stores, runs and runners.json")
    add("--runners", default="4,8,16", help="numbers of runner processes; default: %(default)s")
    add("--batch", type=int, default=64, help="tasks of 8 rollouts per step; default: %(default)s")
    add("--steps", type=int, default=5, help="of which the first two warm up; default: %(default)s")
    add("--reply", type=int, default=42, help="most tokens of a reply; default: %(default)s")
    add("--shape", default="0.5b", help="as for dev.gpu.random_model; default: %(default)s")
    add("--model", help="a folder with a model instead")
    add("--spider", metavar="FOLDER", help="real Spider and the longer prompts")
    add("--limit", type=float, default=150.0, help="seconds for each number; default: %(default)g")
    add("--device", default="cuda", help="cpu for a trial; default: %(default)s")
    add("settings", nargs="*", metavar="KEY=VALUE", help="settings of the trainer, e.g. sampler=vllm")
    options = parser.parse_intermixed_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds none")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.model:
        save_random_model(options.shape, options.out / "model")
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    result |= {"cpus": psutil.cpu_count(), "figures": []}
    failed = 0
    for number in map(int, options.runners.split(",")):
        figures = measure(number, options.model or str(options.out / "model"), options)
        failed += bool(figures["exit"])
        print(json.dumps(figures), flush=True)
        result["figures"].append(figures)
        (options.out / "runners.json").write_text(json.dumps(result, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
