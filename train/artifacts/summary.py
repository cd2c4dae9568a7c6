"""What a run came to: ``summary.json``, made from the run's own files, however the run ended."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from groundwire import domains
from groundwire.tools.step_timer import PHASES
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import RunConfig

__all__ = ["summarize"]

_STARTER = (
    "The starter is a toy policy that stopped learning early on purpose, so that reinforcement learning has room. The "
    "bundled validation databases are new to it but generated; on real Spider it scores near zero."
)

_STARTER_IN_PROSE = (
    "The starter is a toy policy that knows nothing but SQL over other databases: it writes no prose, so its reward is "
    "near zero here, before and after. This run shows that everything works; give --model a model that can write."
)


def summarize(run: RunDir, config: RunConfig, source: str) -> dict[str, Any]:
    """The content of ``summary.json``, made from the metrics so far. ``source`` names the data."""
    lines = run.metrics()
    steps = [line for line in lines if line["step"] > 0]
    failures: Counter[str] = Counter()
    for line in steps:
        failures.update(line["failures"])
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
        "validation": _before_after(lines, "validation"),
        "validation_sampled": _before_after(lines, "validation_sampled"),
        "seconds": {part: round(sum(line["seconds"][part] for line in steps), 2) for part in PHASES},
        "idle_fraction": _share(steps, "waiting"),
    }
    if config.model == "starter":
        prose = domains.answer_form(domains.get(config.domain)) == "prose"
        summary["note"] = _STARTER_IN_PROSE if prose else _STARTER
    return summary


def _before_after(lines: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The full validations before and after training; a run that was stopped has no ``after`` yet."""
    measured = [line[name] for line in lines if name in line]
    if not measured:
        return {}
    before, after = measured[0], measured[-1]
    result = {"before": before["accuracy"], "before_ci95": before["ci95"], "n": before["n"]}
    done = after is not before and after["total"] == before["total"]  # the shorter ones on the way judge fewer tasks
    if done:
        result |= {"after": after["accuracy"], "after_ci95": after["ci95"]}
    for key in ("by_hardness", "by_subject_split"):
        if key in before:
            result[f"before_{key}"] = before[key]
            if done and key in after:
                result[f"after_{key}"] = after[key]
    return result


def _share(steps: Sequence[dict[str, Any]], part: str) -> float:
    total = sum(sum(line["seconds"].values()) for line in steps)
    return round(sum(line["seconds"][part] for line in steps) / total, 4) if total else 0.0


def _peak_memory_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)
