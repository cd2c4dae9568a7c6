"""Reads a run of training or an evaluation: its validations, and the pass rates of its tasks. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from groundwire import domains
from groundwire.domains import Breakdowns, Domain, Task
from groundwire.tools.errors import UserError
from groundwire.train.algorithms.curriculum import PassRates
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir, RunDirError
from groundwire.train.artifacts.run_files import ROLLOUT_COLUMNS
from groundwire.train.evaluation.metrics import compute_metrics

__all__ = ["final_rows", "first_and_last", "read_pass_rates", "table_entry"]

Rows = list[dict[str, Any]]


def table_entry(run: RunDir, domain: Domain | None = None) -> dict[str, Any]:
    """A run as a row of :func:`groundwire.train.evaluation.table.table`.

    ``before`` and ``after`` are the metrics of a training run's first and last full validation, at the lowest
    temperature that it validated at; ``before`` is None for an evaluation. Without ``domain`` it is the one that the
    run names. Raises :class:`groundwire.train.artifacts.run_dir.RunDirError`.
    """
    config = run.config()
    breakdowns: Breakdowns = {}
    with suppress(UserError):  # the domain may be a plugin that is not installed here
        breakdowns = domains.breakdowns_of(domain or domains.get(str(config.get("domain"))))
    before, after = first_and_last(run)
    agents = sorted({call["agent"] for row in [*before, *after] for call in row["calls"] or () if call["agent"]})
    return {
        "run": run.path.name,
        "model": _model_name(str(config.get("model"))),
        "backend": config.get("backend"),
        "context": None if config.get("evaluation", {}).get("base_url") else config.get("max_model_len"),
        "max_turns": config.get("max_turns"),
        "agents": config.get("agent_match") or ", ".join(agents) or "-",
        "before": compute_metrics(before, breakdowns) if before else None,
        "after": compute_metrics(after, breakdowns),
    }


def final_rows(run: RunDir) -> Rows:
    """The rows of a run's last full validation. Raises :class:`groundwire.train.artifacts.run_dir.RunDirError`."""
    return first_and_last(run)[1]


def read_pass_rates(run: RunDir, tasks: Iterable[Task], columns: Iterable[str]) -> PassRates:
    """The pass rates of the tasks in the run's rollouts so far, without files that cannot be read.

    Tasks with the same values in these columns are a class.
    """
    columns = list(columns)
    rates = PassRates({str(task["id"]): "/".join(str(task.get(column)) for column in columns) for task in tasks})
    for rows in run.rollout_batches(["step", "mode", "task_id", "reward"], []):
        rates.add_rows(rows)
    return rates


def _model_name(model: str) -> str:
    """The run and step of a checkpoint, the name of another folder, or the model's name."""
    path = Path(model)
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.name}"
    return path.name if path.is_dir() else model


def first_and_last(run: RunDir) -> tuple[Rows, Rows]:
    """The first validation, empty if it is the only one, and the last with as many rollouts."""
    validations = list(_validations(run))
    lowest = min(temperature for _, temperature, _ in validations)
    by_step: dict[int, Rows] = {}
    for step, temperature, rows in validations:
        if temperature == lowest:
            by_step.setdefault(step, []).extend(rows)
    first = min(by_step)
    last = max(step for step, rows in by_step.items() if len(rows) >= len(by_step[first]))
    return ([] if last == first else by_step[first]), by_step[last]


def _validations(run: RunDir) -> Iterator[tuple[int, float, Rows]]:
    """Step, temperature and rows of each part of a validation.

    Raises :class:`groundwire.train.artifacts.run_dir.RunDirError` if there is none, or if a file cannot be read: the
    metrics of the other questions would not be comparable.
    """
    unreadable: list[str] = []
    found = False
    for batch in run.rollout_batches(None, unreadable, ROLLOUT_COLUMNS):
        if rows := [row for row in batch if row["mode"] == "val"]:
            found = True
            yield rows[0]["step"], rows[0]["temperature"], rows
    if missing := [message for message in unreadable if "-train.parquet" not in message]:
        raise RunDamagedError(f"{run.path} cannot be evaluated: {missing[0]}")
    if not found:
        raise RunDirError(f"{run.path} has no validation yet")
