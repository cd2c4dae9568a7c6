"""Compare the dense rewards with execution match: train with each, and judge the trained models by execution match.

``python -m benchmarks.dense_rewards [--steps 36] [--seeds 3] [--data-dir FOLDER] [KEY=VALUE ...]``, with any setting of
``train.run``. It prints for each run the share of its groups that had a gradient, and the exact accuracy of its last
policy on all validation questions (or ``val_tasks`` of them); then the means of each reward. A run is the same as

    python -m train.run --reward REWARD --seed SEED --steps STEPS --output-dir runs/dense_rewards
    python -m train.evaluate --model runs/dense_rewards/latest --reward spider_exec_match --tasks 0
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from groundwire.tools.errors import exit_on_user_error
from groundwire.train import evaluate, fit
from groundwire.train.config.overrides import parse_overrides

REWARDS = ("spider_exec_match", "spider_dense", "spider_dense_result")


def measure(reward: str, seed: int, settings: dict[str, Any]) -> tuple[float, float]:
    """The share of groups with a gradient, and the exact accuracy of a run's last policy."""
    run = fit(tasks="spider", reward=reward, seed=seed, quiet=True, **settings)
    steps = [line for line in run.metrics if line.get("groups")]
    shares = sum(line["groups_used"] for line in steps) / sum(line["groups"] for line in steps)
    exact = evaluate(
        tasks="spider",
        reward="spider_exec_match",
        model=run.run_dir,
        val_tasks=settings.get("val_tasks", 0),
        output_dir=settings["output_dir"],
        data_dir=settings.get("data_dir"),
        quiet=True,
    )
    return shares, exact.accuracy.value or 0.0


def main() -> None:
    """Train and judge with each reward and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    settings = {"backend": "langgraph", "output_dir": "runs/dense_rewards", "steps": options.steps}
    print(f"{'reward':<22}{'seed':>5}{'gradient':>10}{'accuracy':>10}")
    figures: dict[str, list[tuple[float, float]]] = {reward: [] for reward in REWARDS}
    with exit_on_user_error():
        settings |= {"data_dir": options.data_dir} if options.data_dir else {}
        settings |= parse_overrides(options.settings)
        for seed in range(options.seeds):
            for reward in REWARDS:
                figures[reward].append(measure(reward, seed, settings))
                print(
                    f"{reward:<22}{seed:>5}{figures[reward][-1][0]:>10.3f}{figures[reward][-1][1]:>10.3f}", flush=True
                )
    for reward, runs in figures.items():
        shares, accuracies = zip(*runs, strict=True)
        print(f"{reward:<22}{'mean':>5}{statistics.mean(shares):>10.3f}{statistics.mean(accuracies):>10.3f}")


if __name__ == "__main__":
    main()
