"""Runs the agents of examples/frameworks as their authors wrote them, and writes the tables in docs/frameworks.md
and README.md.

Each agent gets an environment of its own, is checked against a scripted policy (see conformance.py), and is trained
for a few steps. The results are in docs/frameworks.json; those of agents that are not named stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.frameworks._agents import AGENTS, ROOT, Agent
from benchmarks.frameworks._environments import InstallError, environment, make, overridden, versions
from benchmarks.frameworks._table import write_pages
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.report.token_text import token_decoder
from groundwire.train.why import find_mismatches

_RESULTS = ROOT / "docs" / "frameworks.json"
_CHECK_S, _TRAINING_S = 600, 3600
"""After which a program hangs: a check takes seconds, a training minutes."""
SETTINGS = (
    "steps=12",
    "tasks_per_step=8",
    "val_tasks=32",
    "val_every=0",
    "max_model_len=4096",
    "credit=broadcast",
    "learning_rate=2e-4",
    "lr_schedule=constant",
    "checkpoint_every=100",
    "rollout_timeout_s=300",
    "rollout_process=off",
)
"""The agents keep no state, so all rollouts of one run in one process, which needs half of the CPU time."""


class FailedError(Exception):
    """A program ended with an error, or took too long."""


def main() -> int:
    """Run the agents one after the other; the exit status is the number that were not traced and trained."""
    folders = [agent.folder for agent in AGENTS]
    parser = argparse.ArgumentParser(prog="make frameworks", description=__doc__)
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=f"of {', '.join(folders)}; default: all")
    parser.add_argument("--no-training", action="store_true", help="only the check against the scripted policy")
    parser.add_argument(
        "--gpu", metavar="PYTHON", help="only train, with verl in this environment; the agent's is that of PYTHON"
    )
    parser.add_argument("--set", nargs="*", default=SETTINGS, metavar="KEY=VALUE", help="settings of the training")
    options = parser.parse_args()
    if unknown := sorted(set(options.agents) - set(folders)):
        parser.error(f"no agent {unknown[0]!r}; known: {', '.join(folders)}")
    results = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    failed = 0
    for agent in AGENTS:
        if options.agents and agent.folder not in options.agents:
            continue
        before = results.get(agent.folder, {})
        if options.gpu:
            result = before | _run_on_gpu(agent, options.gpu, options.set)
        else:
            result = _run(agent, [] if options.no_training else list(options.set))
            kept = ("training", "gpu") if options.no_training else ("gpu",)
            result |= {name: before[name] for name in kept if name in before}
        results[agent.folder] = result
        failed += bool(result.get("reason"))
        print(f"{agent.title}: {result.get('reason') or 'ok'}, {result['seconds']:.0f} s", flush=True)
        _RESULTS.write_text(json.dumps({name: results[name] for name in folders if name in results}, indent=2) + "\n")
    write_pages(results)
    return failed


def _run(agent: Agent, settings: list[str]) -> dict[str, Any]:
    """The result of one agent; ``reason`` says what went wrong."""
    started = time.monotonic()
    result: dict[str, Any] = {}
    try:
        python = make(agent)
        result |= {"versions": versions(agent, python), "overridden": overridden(agent, python)}
        result["check"] = json.loads(_output(_CHECK_S, python, "-m", "benchmarks.frameworks.conformance", agent.folder))
        if result["check"]["problems"]:
            raise FailedError(result["check"]["problems"][0])
        result["replays"] = json.loads(_output(_CHECK_S, python, "-m", "benchmarks.frameworks.replays", agent.folder))
        if agent.trained and settings:
            result["training"] = _train(agent, python, settings)
    except (InstallError, FailedError) as error:
        result["reason"] = str(error)
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def _run_on_gpu(agent: Agent, python: str, settings: Sequence[str]) -> dict[str, Any]:
    import torch

    options = ["--trainer", "verl", "--config", "starter", "--runner-python", python]
    trained = _train(agent, sys.executable, [*options, *settings])
    return {"gpu": {"card": torch.cuda.get_device_name(), **trained}}


def _train(agent: Agent, python: str, settings: Sequence[str]) -> dict[str, Any]:
    """Accuracy before and after, and the mismatches of the prompts by cause."""
    with tempfile.TemporaryDirectory() as folder:
        _output(_TRAINING_S, python, "-m", "groundwire.train.run", *agent.options, "--output-dir", folder, *settings)
        run = RunDir.open(str(Path(folder) / "latest"))
        summary = json.loads((run.path / "summary.json").read_text())
        decoder, causes, later = token_decoder(run), Counter[str](), 0
        for rollouts in run.rollout_batches(["calls"], []):
            for calls in (rollout.trainable_calls for rollout in rollouts):
                later += max(0, len(calls) - 1)
                causes.update(mismatch.cause for mismatch in find_mismatches(calls, decoder))
        kept = ("steps", "rollouts", "failures", "validation", "validation_sampled", "wall_time_s")
        return {**{name: summary[name] for name in kept}, "later_prompts": later, "mismatches": dict(causes)}


def _output(limit_s: float, *command: str) -> str:
    """The last line that a program prints. Raises :class:`FailedError`."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise FailedError(f"{command[2]} took more than {limit_s:.0f} s") from None
    finally:  # also what the agent left running
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        lines = [*output.splitlines(), *errors.splitlines()]
        raise FailedError(lines[-1] if lines else f"{command[2]} ended with status {process.returncode}")
    return output.splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
