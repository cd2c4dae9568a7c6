"""The metrics of a step's rollouts with verl, which may come in several parts, and their rows in the run directory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import Any

from groundwire import domains
from groundwire.train.algorithms.health import reply_counts, step_figures
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.tracking import flat_numbers
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.metrics import compute_accuracy, few_questions, made_no_call
from groundwire.train.evaluation.notes import RolloutNotes, agent_notes, gold_in_prompts
from groundwire.train.evaluation.stop_reasons import FailedSteps, failed_by_policy, lasting_failure, nothing_judged
from groundwire.train.evaluation.validation import validation_name
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.factory import make_reward
from groundwire.train.rollouts.runtime import MODEL_NAME
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.rows import to_row

_log = logging.getLogger(__name__)


@dataclass
class _Metrics:
    """Of the rollouts of a step, or of a part of them."""

    step: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows of ``rollouts.parquet`` without the columns that take most of the memory."""
    counts: Counter[str] = field(default_factory=Counter)
    """Metrics that add up over the parts of a step."""
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, part: _Metrics) -> None:
        self.rows += part.rows
        self.counts.update(part.counts)
        self.seconds.update(part.seconds)

    def means(self) -> dict[str, float]:
        """Metrics that do not add up; empty without rollouts."""
        metrics: dict[str, float] = {}
        if seconds := [row["seconds"] for row in self.rows]:
            metrics |= {"seconds_mean": round(mean(seconds), 3), "seconds_max": round(max(seconds), 3)}
        if rewards := [row["reward"] for row in self.rows if row["reward"] is not None]:
            metrics["reward_mean"] = mean(rewards)
        if tokens := self.counts["batch_tokens"]:  # an estimate without bias: the policy sampled them
            metrics["entropy"] = -self.counts["batch_logprobs"] / tokens
        return metrics


class SampledSteps:
    """Writes the rollouts that verl's trainer has sampled, and their metrics, to the run directory.

    With several updates per step (``separate_async``) verl samples several times per step.
    """

    def __init__(self, config: RunConfig, run: RunDir) -> None:
        self._config, self._run = config, run
        self._steps: dict[str, _Metrics] = {}  # the last step of each partition, so far
        # Writing thousands of rollouts takes a while, and the GPUs can update meanwhile.
        self._writer, self._written = ThreadPoolExecutor(1, thread_name_prefix="write-rollouts"), Future[None]()
        self._written.set_result(None)
        self._failed_steps = FailedSteps()
        self._notes = RolloutNotes(partial(_log.warning, "%s"), run=run.path, credit=config.credit)
        self._agent_checked = False

    def add(
        self, partition: str, step: int, rollouts: Sequence[Rollout], counts: Counter[str], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Metrics of ``rollouts``, for verl's log. A line in ``rollouts.jsonl`` is about the whole step so far.

        ``counts`` are those of their groups. verl adds up the metrics with ``total`` in their names. Raises
        :class:`RolloutsFailedError` if the run shall end.
        """
        self.finish_writing()
        rows = list(map(to_row, rollouts))
        part = _metrics_of(step, rows, counts, seconds, self._config.agent_match)
        continues = partition in self._steps and self._steps[partition].step == step
        total = self._steps[partition] if continues else _Metrics(step)
        self._steps[partition] = total
        total.add(part)
        if rows:
            kind = f"val-{self._config.val_temperature:g}" if partition == "val" else "train"
            self._written = self._writer.submit(self._run.write_rollouts, step, rows, kind=kind, append=continues)
        self._check(partition, rows)
        self._notes.show(rows)
        line: dict[str, Any] = {"step": step, "partition": partition, **total.counts, **total.means()}
        line["seconds"] = {name: round(value, 4) for name, value in total.seconds.items()}
        if partition == "val":
            self._show_agent_notes(rollouts, rows)
            breakdowns = domains.get(self._config.domain).breakdowns
            line[validation_name(self._config.val_temperature)] = compute_accuracy(total.rows, breakdowns)
        self._run.append_rollout_metrics(line)
        busy_s = seconds.get("sampling", 0.0) + seconds.get("update", 0.0)
        metrics = {f"{name}_total": float(count) for name, count in part.counts.items()} | part.means()
        metrics |= flat_numbers(step_figures(part.counts, part.counts))
        metrics["gpu_idle_fraction"] = round(1 - busy_s / max(1e-9, sum(seconds.values())), 4)
        return {f"rollouts/{name}": value for name, value in metrics.items()}

    def finish_writing(self) -> None:
        """Wait until the rollouts of the last :meth:`add` are written. Raises why they could not be."""
        self._written.result()

    def _check(self, partition: str, rows: Sequence[Mapping[str, Any]]) -> None:
        reason = "" if failed_by_policy(rows) else lasting_failure(rows)
        if reason := reason or (nothing_judged(rows) if partition == "val" else self._failed_steps.add(rows)):
            raise RolloutsFailedError(reason)

    def _show_agent_notes(self, rollouts: Sequence[Rollout], rows: Sequence[Mapping[str, Any]]) -> None:
        """Once, after the first validation."""
        if self._agent_checked:
            return
        self._agent_checked = True
        domain = domains.get(self._config.domain)
        models = (call.model for rollout in rollouts for call in rollout.trainable_calls)
        few = few_questions(len({row["task_id"] for row in rows}))
        view = AgentView.of(domain, make_reward(self._config, domain), self._config.agent_columns)
        for note in filter(None, [*agent_notes(rows, models, MODEL_NAME), few, gold_in_prompts(rollouts, view)]):
            _log.warning("%s", note)


def _metrics_of(
    step: int,
    rows: Sequence[Mapping[str, Any]],
    counts: Counter[str],
    seconds: Mapping[str, float],
    agent_match: str | None,
) -> _Metrics:
    """``counts`` has the groups' counts and ``dropped_unused``; those of the rollouts are added."""
    failed = [row for row in rows if row["status"] != "succeeded"]
    counts.update(f"{'dropped' if row['reward'] is None else 'zero'}_{row['status']}" for row in failed)
    counts.update(
        ended=len(rows),
        dropped=sum(count for name, count in counts.items() if name.startswith("dropped_")),
        zero=sum(row["reward"] is not None for row in failed),
        **({"without_calls": silent} if (silent := sum(map(made_no_call, rows))) else {}),
        retried=sum(row["attempts"] > 1 for row in rows),
        calls=sum(len(row["calls"]) for row in rows),
        tokens_sampled=sum(len(call["response_ids"]) for row in rows for call in row["calls"]),
        **reply_counts(rows, agent_match),
    )
    small = [{**row, "calls": [{} for _ in row["calls"]], "agent_steps": "[]"} for row in rows]
    return _Metrics(step, small, counts, Counter(seconds))
