"""Compare the dense rewards with execution match: train with each, and judge the trained models by execution match.

``python -m benchmarks.dense_rewards OUT [--seeds 0,1,2] [--steps 36] [--data-dir FOLDER]``. It prints for each run the
share of its groups that had a gradient, and the exact accuracy of its last policy on all validation questions; then the
means of each reward. Runs that ``OUT`` has already are not repeated. A run is the same as

    python -m train.run --reward REWARD --seed SEED --steps STEPS --val-every 0
    python -m train.evaluate --model RUN_DIR --reward spider_exec_match --tasks 0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

from benchmarks._processes import run_once
from benchmarks._results import record
from groundwire.train.artifacts.run_dir import RunDir

_EXACT = "spider_exec_match"
_REWARDS = (_EXACT, "spider_dense", "spider_dense_result")


def measure(out: Path, reward: str, arguments: list[str]) -> tuple[float, float]:
    """The share of groups with a gradient, and the exact accuracy of a run's last policy."""
    run = run_once("run", out, ["--reward", reward, "--val-every", "0", *arguments])
    steps = [line for line in RunDir.open(str(run)).metrics() if line.get("groups")]
    share = sum(line["groups_used"] for line in steps) / sum(line["groups"] for line in steps)
    judged = run_once("evaluate", out / "judged", ["--model", str(run), "--reward", _EXACT, "--tasks", "0"])
    return share, json.loads((judged / "evaluation.json").read_text())["accuracy"]


def main() -> None:
    """Train and judge with each reward and seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dense_rewards", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    data = ["--data-dir", options.data_dir] if options.data_dir else []
    print(f"{'reward':<22}{'seed':>5}{'gradient':>10}{'accuracy':>10}")
    figures: dict[str, list[tuple[float, float]]] = {reward: [] for reward in _REWARDS}
    for seed in options.seeds.split(","):
        for reward, runs in figures.items():
            arguments = ["--seed", seed, "--steps", str(options.steps), *data]
            runs.append(measure(options.out / f"{reward}-{seed}", reward, arguments))
            print(f"{reward:<22}{seed:>5}{runs[-1][0]:>10.3f}{runs[-1][1]:>10.3f}", flush=True)
    for reward, runs in figures.items():
        share, accuracy = (fmean(values) for values in zip(*runs, strict=True))
        print(f"{reward:<22}{'mean':>5}{share:>10.3f}{accuracy:>10.3f}")
        record(f"{reward}: exact accuracy", accuracy, unit="share of all validation questions")


if __name__ == "__main__":
    main()
