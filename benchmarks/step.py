"""A whole step of the local trainer: the share of sampling and update, which is the work of the model alone.

The alternative is the same sampling and update without agents, proxy, store and rewards, a share of 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks._results import read_lines, record

STEPS, WARM_UP = 6, 1


def main() -> None:
    """Print the share of each phase in the median step, by backend."""
    print(f"{'backend':16}{'step s':>8}{'tokens/s':>10}{'rollouts/s/core':>17}   share of the step")
    for backend in ("langgraph", "openai-agents"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "groundwire.train.run", "--backend", backend, "--output-dir", folder]
            command += ["--trainer", "local", "--steps", str(STEPS), "--val-tasks", "8"]
            bundled = {name: value for name, value in os.environ.items() if name != "SPIDER_DATA_DIR"}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=bundled)
            [metrics] = Path(folder).glob("2*/metrics.jsonl")
            steps = read_lines(metrics)[1 + WARM_UP :]
        totals = [sum(step["seconds"].values()) for step in steps]
        shares = [
            {phase: seconds / total for phase, seconds in step["seconds"].items()}
            for step, total in zip(steps, totals, strict=True)
        ]
        phases = ", ".join(f"{phase} {median(share[phase] for share in shares):.2f}" for phase in shares[0])
        speed = [
            median(step["speed"][name] for step in steps)
            for name in ("tokens_per_s_per_machine", "rollouts_per_s_per_core")
        ]
        print(f"{backend:16}{median(totals):8.2f}{speed[0]:10.0f}{speed[1]:17.2f}   {phases}", flush=True)
        model_share = median(share["sampling"] + share["update"] for share in shares)
        figure = f"local trainer, {backend}: sampling and update in a step"
        record(figure, model_share, unit="share", against="the model alone", theirs=1.0)


if __name__ == "__main__":
    main()
