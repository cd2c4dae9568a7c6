"""A whole step of the local trainer: how much of it is the model's own work, sampling and update.

What a user would otherwise run is the same sampling and the same update with nothing around them: no agents, proxy,
store or rewards. A share of 1 would be that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks._results import record

STEPS, WARM_UP = 6, 1


def main() -> None:
    """Print where each part of the median step goes, by backend."""
    print(f"{'backend':16}{'step s':>8}{'tokens/s':>10}   share of the step")
    for backend in ("langgraph", "openai-agents"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "train.run", "--backend", backend, "--output-dir", folder]
            command += ["--steps", str(STEPS), "--val-tasks", "8"]
            bundled = {name: value for name, value in os.environ.items() if name != "SPIDER_DATA_DIR"}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=bundled)
            [metrics] = Path(folder).glob("2*/metrics.jsonl")
            steps = [json.loads(line) for line in metrics.read_text().splitlines()][1 + WARM_UP :]
        totals = [sum(step["seconds"].values()) for step in steps]
        shares = {
            part: median(step["seconds"][part] / total for step, total in zip(steps, totals, strict=True))
            for part in steps[0]["seconds"]
        }
        work = median(
            (step["seconds"]["sampling"] + step["seconds"]["update"]) / total
            for step, total in zip(steps, totals, strict=True)
        )
        speed = median(step["tokens_per_s"] for step in steps)
        parts = ", ".join(f"{part} {share:.2f}" for part, share in shares.items())
        print(f"{backend:16}{median(totals):8.2f}{speed:10.0f}   {parts}", flush=True)
        bare = "the model alone"
        record(f"local trainer, {backend}: its work in a step", work, unit="share", against=bare, theirs=1.0)


if __name__ == "__main__":
    main()
