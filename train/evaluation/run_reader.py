"""What the folder of a run, of training or of evaluation, says of its validations. Reading needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir, RunDirError
from groundwire.train.evaluation.metrics import compute_metrics

__all__ = ["NoValidationError", "entry", "final_rows"]


class NoValidationError(RunDirError):
    """A run that validated nothing."""


def entry(run: RunDir) -> dict[str, Any]:
    """A run, of training or of evaluation, as a line of :func:`groundwire.train.evaluation.table.table`.

    A training run is measured by its validations at the lowest temperature that it validated at: the one before
    training, and the last over as many questions. Raises :class:`groundwire.train.artifacts.run_dir.RunDirError`.
    """
    config = run.config()
    before, after = _ends(run)
    last = compute_metrics(after)
    agents = sorted({call["agent"] for each in [*before, *after] for call in each["calls"] or () if call["agent"]})
    return {
        "run": run.path.name,
        "model": _short(str(config.get("model"))),
        "backend": config.get("backend"),
        "context": None if config.get("evaluation", {}).get("base_url") else config.get("max_model_len"),
        "max_turns": config.get("max_turns"),
        "agents": config.get("agent_match") or ", ".join(agents) or "-",
        "before": compute_metrics(before) if before else None,
        "after": last,
    }


def _short(model: str) -> str:
    """A model as a table names it: a checkpoint by its run and step, another folder by its name, a name as it is."""
    path = Path(model)
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.name}"
    return path.name if path.is_dir() else model


def final_rows(run: RunDir) -> list[dict[str, Any]]:
    """The rows of a run's last full validation. Raises :class:`groundwire.train.artifacts.run_dir.RunDirError`."""
    return _ends(run)[1]


def _ends(run: RunDir) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows before training (none for an evaluation), and those of the last validation as large."""
    validated = list(_validations(run))
    coldest = min(temperature for _, temperature, _ in validated)
    by_step: dict[int, list[dict[str, Any]]] = {}
    for step, temperature, rows in validated:
        if temperature == coldest:
            by_step.setdefault(step, []).extend(rows)
    steps = sorted(by_step)
    last = max(step for step in steps if len(by_step[step]) >= len(by_step[steps[0]]))
    return ([] if last == steps[0] else by_step[steps[0]]), by_step[last]


def _validations(run: RunDir) -> Iterator[tuple[int, float, list[dict[str, Any]]]]:
    """Step, temperature and rows of each part of a validation.

    Raises :class:`NoValidationError` for none, and :class:`groundwire.train.artifacts.run_dir.RunDamagedError` for a
    file that cannot be read: figures without its questions would be another measurement.
    """
    damaged: list[str] = []
    found = False
    for batch in run.rollout_batches(None, damaged):
        rows = [each for each in batch if each["mode"] == "val"]
        if rows:
            found = True
            yield rows[0]["step"], rows[0]["temperature"], rows
    if missing := [sentence for sentence in damaged if "-train.parquet" not in sentence]:
        raise RunDamagedError(f"{run.path} cannot be measured: {missing[0]}")
    if not found:
        raise NoValidationError(f"{run.path} has no validation yet: there is nothing to measure")
