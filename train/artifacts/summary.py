"""Summarizes a run in ``summary.json``, from the metrics that it has written so far."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.tools.step_timer import PHASES
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig


def summarize(run: RunDir, config: RunConfig, source: str, *, note: str = "") -> dict[str, Any]:
    """The content of ``summary.json``. ``source`` describes the data; ``note`` is for the reader."""
    lines = run.metrics()
    steps = [line for line in lines if line["step"] > 0]
    failures: Counter[str] = Counter()
    for line in steps:
        failures.update(line["failures"])
    silent = sum(line.get("without_calls", 0) for line in steps)
    seconds = {phase: sum(line["seconds"][phase] for line in steps) for phase in PHASES}
    total_s = sum(sum(line["seconds"].values()) for line in steps)
    summary: dict[str, Any] = {
        "backend": config.backend,
        "domain": config.domain,
        "data": source,
        "model": config.model,
        "seed": config.seed,
        "steps": steps[-1]["step"] if steps else 0,
        "wall_time_s": lines[-1]["wall_time_s"] if lines else 0.0,
        "peak_memory_mb": _peak_memory_mb(),
        "rollouts": sum(line["rollouts"] for line in steps),
        "failures": dict(failures),
        **({"without_calls": silent} if silent else {}),
        "validation": _before_after(lines, "validation"),
        "validation_sampled": _before_after(lines, "validation_sampled"),
        "seconds": {phase: round(value, 2) for phase, value in seconds.items()},
        "idle_fraction": round(seconds["waiting"] / total_s, 4) if total_s else 0.0,
    }
    if best := run.checkpoints.best():
        summary["best_checkpoint"] = {name: best[name] for name in ("step", "accuracy", "n")}
    if reason := untrained(lines):
        summary["untrained"] = reason
    if note:
        summary["note"] = note
    return summary


def untrained(lines: Sequence[Mapping[str, Any]]) -> str:
    """That nothing was trained, if no step in the metrics of a run had a gradient; empty if one had."""
    steps = [line for line in lines if "groups_used" in line]
    if not steps or any(line["groups_used"] or "learning_rate" in line for line in steps):
        return ""
    return f"nothing was trained: in no group of {len(steps)} step(s) did the rewards of rollouts differ"


def _before_after(lines: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The full validations before and after training, with their breakdowns; a stopped run has no ``after``."""
    validations = [line[name] for line in lines if name in line]
    if not validations:
        return {}
    before, after = validations[0], validations[-1]
    result = {"n": before["n"], **_prefixed("before", before)}
    if after is not before and after["total"] == before["total"]:  # validations during training have fewer tasks
        result |= _prefixed("after", after)
    return result


def _prefixed(prefix: str, validation: Mapping[str, Any]) -> dict[str, Any]:
    return {
        prefix: validation["accuracy"],
        f"{prefix}_ci95": validation["ci95"],
        f"{prefix}_first_query": validation.get("first_query_accuracy"),
        **{
            f"{prefix}_{key}": {value: part["accuracy"] for value, part in parts.items()}
            for key, parts in validation.items()
            if key.startswith("by_")
        },
    }


def _peak_memory_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)
