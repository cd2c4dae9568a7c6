"""How long the steps of a training run took, and for what: the second table of ``groundwire evaluate RUN_DIR``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.train.artifacts.run_dir import RunDir

__all__ = ["SPEED_COLUMNS", "read_speed", "speed_cells"]

SPEED_COLUMNS = ("Run", "GPUs", "Steps", "Hours", "Seconds per step", "Rollout", "Update")


def read_speed(run: RunDir) -> dict[str, Any] | None:
    """The run's ``gpus`` (None: unknown), ``steps``, ``hours`` and ``seconds_per_step``, and the shares of rollout and
    update in the steps (None: unknown). None for a run without a step.
    """
    config, lines = run.config(), run.metrics()
    steps = [line for line in lines if line["step"] > 0 and "seconds" in line]
    if not steps:
        return None
    times = [_verls_times(line["verl"]) if "verl" in line else _own_times(line["seconds"]) for line in steps]
    total_s, rollout_s, update_s = (sum(each) for each in zip(*times, strict=True))
    return {
        "gpus": _gpus(config, steps),
        "steps": len(steps),
        "hours": round(lines[-1].get("wall_time_s", 0.0) / 3600, 3),
        "seconds_per_step": round(total_s / len(steps), 2),
        "rollout_share": round(rollout_s / total_s, 4) if total_s else None,
        "update_share": round(update_s / total_s, 4) if total_s else None,
    }


def speed_cells(run: str, speed: Mapping[str, Any]) -> list[str]:
    """A row under :data:`SPEED_COLUMNS`."""
    shares = [speed[name] for name in ("rollout_share", "update_share")]
    return [
        run,
        "-" if speed["gpus"] is None else str(speed["gpus"]),
        str(speed["steps"]),
        f"{speed['hours']:.2f}",
        f"{speed['seconds_per_step']:.1f}",
        *("-" if share is None else f"{100 * share:.1f} %" for share in shares),
    ]


def _own_times(seconds: Mapping[str, float]) -> tuple[float, float, float]:
    """Seconds of a step, of its rollouts and of its update. Everything but the update is for the rollouts."""
    total = sum(seconds.values())
    return total, total - seconds.get("update", 0.0), seconds.get("update", 0.0)


def _verls_times(logged: Mapping[str, Any]) -> tuple[float, float, float]:
    total, rollout, update = (float(logged.get(f"timing_s/{name}") or 0.0) for name in ("step", "gen", "update_actor"))
    return total, rollout, update


def _gpus(config: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> int | None:
    """Of a run with verl from its throughput, which is tokens per second and GPU."""
    if config.get("trainer") != "verl":
        return int(str(config.get("device")).startswith("cuda"))
    logged = steps[-1].get("verl", {})
    tokens, seconds, throughput = (
        logged.get(f"perf/{name}") for name in ("total_num_tokens", "time_per_step", "throughput")
    )
    if tokens and seconds and throughput:
        return round(tokens / (seconds * throughput))
    given = config.get("verl", {})
    per_node = given.get("trainer.n_gpus_per_node")
    return None if per_node is None else int(per_node) * int(given.get("trainer.nnodes", 1))
