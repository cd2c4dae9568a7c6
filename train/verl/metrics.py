"""The metrics of a run with verl: those of its rollouts, from the trainer's process, and one file of all of them.

:class:`SampledSteps` writes ``rollouts.jsonl`` and returns the same figures for verl's log and trackers.
:func:`follow_verl_log` makes ``metrics.jsonl``, with the fields of the local trainer's, of it and of verl's own log.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from groundwire import domains
from groundwire.tools.files import parse_json, read_bytes
from groundwire.tools.machine import processors
from groundwire.train.algorithms.distillation import teacher_means
from groundwire.train.algorithms.health import HealthRules, reply_counts, step_figures
from groundwire.train.algorithms.speed import ModelCost, device_name, gpu_idle, step_speed
from groundwire.train.artifacts.metrics_lines import MetricsLine, add_lost_runners
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.tracking import flat_numbers
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_names import COMPUTED, TRAINING_GPUS, UPDATE_FLOPS
from groundwire.train.evaluation.metrics import component_means, compute_accuracy, few_questions
from groundwire.train.evaluation.notes import (
    FailedSteps,
    RolloutNotes,
    agent_notes,
    failed_by_policy,
    is_transient,
    lasting_failure,
    nothing_judged,
)
from groundwire.train.evaluation.validation import validation_name
from groundwire.train.evaluation.verdict import verdict
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.errors import RolloutsFailedError
from groundwire.train.rollouts.factory import make_reward
from groundwire.train.rollouts.runtime import MODEL_NAME
from groundwire.train.step_timer import PHASES
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.store.rows import to_row

_log = logging.getLogger(__name__)
_MAX_BYTES = 1 << 30
_COUNTS = ("groups", "groups_used", "groups_replaced", "without_calls", "rollouts_trained", "tokens_trained")
_FIGURES = {
    "entropy": "actor/entropy",
    "probability_difference": "training/rollout_probs_diff_mean",
    "sampler_kl": "rollout_corr/k3_kl",
    "kl": "actor/ppo_kl",
    "kl_reference": "actor/kl_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "grad_norm": "actor/grad_norm",
}
"""verl's names of the keys of :class:`groundwire.train.artifacts.metrics_lines.MetricsLine` that it has."""
_LOG = "verl.jsonl"


@dataclass
class _Metrics:
    """Of the rollouts of a step, or of a part of them."""

    step: int
    rollouts: list[Rollout] = field(default_factory=list)
    """Without the tokens and texts of their calls, which take most of the memory; in training without calls."""
    counts: Counter[str] = field(default_factory=Counter)  # metrics that add up over the parts of a step
    seconds: Counter[str] = field(default_factory=Counter)

    def means(self) -> dict[str, float]:
        """Metrics that do not add up; empty without rollouts."""
        metrics: dict[str, float] = {}
        if seconds := [rollout.seconds for rollout in self.rollouts]:
            metrics |= {"seconds_mean": round(mean(seconds), 3), "seconds_max": round(max(seconds), 3)}
        if rewards := [rollout.outcome.reward for rollout in self.rollouts if rollout.outcome.reward is not None]:
            metrics["reward_mean"] = mean(rewards)
        if tokens := self.counts["batch_tokens"]:  # an estimate without bias: the policy sampled them
            metrics["entropy"] = -self.counts["batch_logprobs"] / tokens
        return metrics | teacher_means(self.counts)

    def line(self) -> dict[str, Any]:
        """What the rollouts of a training step say of its line of ``metrics.jsonl``."""
        counts, means, components = self.counts, self.means(), component_means(self.rollouts)
        failures = {name: count for name, count in counts.items() if name.startswith(("dropped_", "zero_"))}
        return {
            "reward": means.get("reward_mean"),
            **({"reward_components": components} if components else {}),
            "rollouts": counts["ended"],
            "failures": {name.partition("_")[2]: count for name, count in failures.items()},
            **{name: counts[name] for name in ("dropped", "groups_skipped", "retried", "calls")},
            **{name: counts[name] for name in _COUNTS if name in counts},
            **{name: means[name] for name in ("entropy", "teacher_kl", "teacher_share") if name in means},
            **step_figures(counts, counts),
            "tokens_generated": counts["tokens_sampled"],
            "flops": {"sampling": float(counts["sampling_flops"])},
            "seconds": {phase: round(float(self.seconds[phase]), 4) for phase in PHASES},
        }


class SampledSteps:
    """Writes the rollouts that verl's trainer has sampled, and their metrics, to the run directory.

    With several updates per step (``separate_async``) verl samples several times per step.
    """

    cost: ModelCost | None = None
    """With it the sampler's operations are counted."""

    def __init__(self, config: RunConfig, run: RunDir) -> None:
        self._config, self._run = config, run
        self._steps: dict[str, _Metrics] = {}  # the last step of each partition, so far
        # Writing thousands of rollouts takes a while, and the GPUs can update meanwhile.
        self._writer, self._written = ThreadPoolExecutor(1, thread_name_prefix="write-rollouts"), Future[None]()
        self._written.set_result(None)
        self._failed_steps, self._agent_checked = FailedSteps(), False
        self._notes = RolloutNotes(partial(_log.warning, "%s"), run=run.path, credit=config.credit)

    def add(
        self, partition: str, step: int, rollouts: Sequence[Rollout], counts: Counter[str], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Metrics of ``rollouts``, for verl's log. A line in ``rollouts.jsonl`` is about the whole step so far, but for
        the runners lost, of which each counts, also in a step that is done again.

        ``counts`` are those of their groups. verl adds up the metrics with ``total`` in their names. Raises
        :class:`RolloutsFailedError` if the run shall end.
        """
        self.finish_writing()
        if self.cost is not None:
            flops: Any = self.cost.sampling(call for rollout in rollouts for call in rollout.calls)
            counts.update(sampling_flops=flops)
        latest = _metrics_of(step, rollouts, counts, seconds, self._config.agent_match)
        continues = partition in self._steps and self._steps[partition].step == step
        total = self._steps[partition] if continues else _Metrics(step)
        self._steps[partition] = total
        total.rollouts += latest.rollouts
        total.counts.update(latest.counts)
        total.seconds.update(latest.seconds)
        if rollouts:
            # A later part of the step may change a score.
            ended = list(zip(rollouts, [replace(rollout.outcome) for rollout in rollouts], strict=True))
            kind = f"val-{self._config.val_temperature:g}" if partition == "val" else "train"
            self._written = self._writer.submit(self._write, step, ended, kind=kind, append=continues)
        reason = "" if failed_by_policy(rollouts) else lasting_failure(rollouts)
        if reason := reason or (nothing_judged(rollouts) if partition == "val" else self._failed_steps.add(rollouts)):
            raise RolloutsFailedError(reason)
        self._notes.show(rollouts)
        if rollouts and not self._agent_checked:
            self._agent_checked = True
            self._check_agent(step, rollouts)
        line: dict[str, Any] = {"step": step, "partition": partition}
        if partition == "train":
            line |= total.line()
        else:
            domain = domains.get(self._config.domain)
            line[validation_name(self._config.val_temperature)] = compute_accuracy(total.rollouts, domain.breakdowns)
        if lost := latest.counts["runners_lost"]:
            line["runners_lost"] = lost
        self._run.append_rollout_metrics(line)
        metrics = {f"{name}_total": float(count) for name, count in latest.counts.items()} | latest.means()
        metrics |= flat_numbers(step_figures(latest.counts, latest.counts))
        metrics["gpu_idle_fraction"] = gpu_idle(seconds)
        return {f"rollouts/{name}": value for name, value in metrics.items()}

    def _check_agent(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Show the notes on the run's first rollouts. Raises :class:`RolloutsFailedError` if training cannot work."""
        config, domain = self._config, domains.get(self._config.domain)
        view = AgentView.of(domain, make_reward(config, domain), config.agent_columns)
        found = verdict(rollouts, view, agent_match=config.agent_match)
        few = few_questions(len({rollout.task["id"] for rollout in rollouts})) if rollouts[0].mode == "val" else ""
        for note in filter(None, [*agent_notes(rollouts, served=MODEL_NAME, view=view), few, *found.notes]):
            _log.warning("%s", note)
        if found.problems and step <= 1 and not is_transient(rollouts):
            raise RolloutsFailedError("; ".join(found.problems))

    def _write(self, step: int, ended: Sequence[tuple[Rollout, Outcome]], *, kind: str, append: bool) -> None:
        rows = [to_row(replace(rollout, outcome=outcome)) for rollout, outcome in ended]
        self._run.write_rows(step, rows, kind=kind, append=append)

    def finish_writing(self) -> None:
        """Wait until the rollouts of the last :meth:`add` are written. Raises why they could not be."""
        self._written.result()


def _metrics_of(
    step: int, rollouts: Sequence[Rollout], counts: Counter[str], seconds: Mapping[str, float], agent_match: str | None
) -> _Metrics:
    """``counts`` has the groups' counts and ``dropped_unused``; those of the rollouts are added."""
    failed = [rollout.outcome for rollout in rollouts if rollout.outcome.failure]
    counts.update(f"{'dropped' if outcome.reward is None else 'zero'}_{outcome.failure}" for outcome in failed)
    calls = [call for rollout in rollouts for call in rollout.trainable_calls]
    if silent := sum(rollout.made_no_call for rollout in rollouts):
        counts["without_calls"] = silent
    counts.update(
        ended=len(rollouts),
        dropped=sum(count for name, count in counts.items() if name.startswith("dropped_")),
        zero=sum(outcome.reward is not None for outcome in failed),
        retried=sum(rollout.attempt is not None and rollout.attempt.number > 1 for rollout in rollouts),
        calls=len(calls),
        tokens_sampled=sum(len(call.response_ids) for call in calls),
        **reply_counts(rollouts, agent_match),
    )
    empty: dict[str, Any] = {"prompt_ids": [], "response_ids": [], "logprobs": []}
    empty |= {"messages_json": "[]", "tools_json": "", "reply_json": ""}
    kept = [
        replace(rollout, calls=[replace(call, **empty) for call in rollout.calls if rollout.mode == "val"])
        for rollout in rollouts
    ]
    return _Metrics(step, kept, counts, Counter(seconds))


def write_metrics(run: RunDir) -> None:
    """Write ``metrics.jsonl`` anew, one line per step: verl's log after what an interrupted run has not repeated."""
    log, logged = _read_lines(run.path / _LOG, "data", dict), defaultdict[int, dict[str, Any]](dict)
    first = min((line["step"] for line in log if "timing_s/step" in line["data"]), default=math.inf)
    earlier = {line["step"]: line for line in run.metrics() if line["step"] < first}
    for line in log:
        logged[line["step"]].update(line["data"])
    sampled, lost = defaultdict[str, dict[int, Any]](dict), Counter[int]()
    for line in _read_lines(run.path / "rollouts.jsonl", "partition", str):
        lost[line["step"]] += line.get("runners_lost", 0)
        sampled[line["partition"]][line["step"]] = {
            name: line[name] for name in line if name in MetricsLine.model_fields
        }
    lines, wall_time_s = [], 0.0
    config = run.config() if any(data.get("perf/throughput") for data in logged.values()) else {}
    for step in sorted(earlier.keys() | logged.keys()):
        data = {**earlier.get(step, {}).get("verl", {}), **logged[step]}
        step_s = float(data.get("timing_s/step", 0.0))
        wall_time_s += step_s + float(data.get("timing_s/testing", 0.0))
        line = {"step": step}
        if step > 0:  # zeros where the run was killed between both files
            line |= {**_Metrics(step).line(), **earlier.get(step, {}), **sampled["train"].get(step, {})}
            line |= {name: data[key] for name, key in _FIGURES.items() if _is_finite(data.get(key))}
            line |= {} if _is_finite(data.get(_FIGURES["grad_norm"], 0.0)) else {"updates_skipped": 1}
            line["tokens_per_s"] = round(line["tokens_generated"] / step_s, 1) if step_s else 0.0
            line |= _speed(config, line, data) if logged[step].get("perf/throughput") else {}
        line |= sampled["val"].get(step, {}) | ({"runners_lost": count} if (count := lost.pop(step, 0)) else {})
        lines.append({**line, "wall_time_s": round(wall_time_s, 2), "verl": data})
    run.write_metrics(add_lost_runners(lines, lost.total()))


def _speed(config: Mapping[str, Any], line: dict[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a line about its speed."""
    step_s, tokens = data["perf/time_per_step"], data["perf/total_num_tokens"]
    gpus = round(tokens / (step_s * data["perf/throughput"]))  # verl's throughput is of one GPU
    computed, update, training = (data.get(f"actor/{name}") for name in (COMPUTED, UPDATE_FLOPS, TRAINING_GPUS))
    keys = {"tokens_computed": int(computed), "flops": {**line["flops"], "update": update}} if computed else {}
    keys["machine"] = {
        **{"device": device_name("cuda"), "gpus": gpus, "training_gpus": int(training) if training else gpus},
        "cores": int(config.get("verl", {}).get("trainer.nnodes", 1)) * processors(),
    }
    times = {"step_s": step_s, "update_s": data.get("timing_s/update_actor") or 0.0}
    return {**keys, "speed": step_speed({**line, **keys}, tokens=tokens, **times)}


@contextmanager
def follow_verl_log(run: RunDir, on_note: Callable[[str], None], interval_s: float = 2.0) -> Iterator[None]:
    """Update ``metrics.jsonl`` from a thread whenever verl's log has grown; ``on_note`` gets the health warnings."""
    stopped, rules = threading.Event(), HealthRules(run.metrics())

    def follow() -> None:
        last_size = 0
        while not stopped.wait(interval_s):
            with suppress(FileNotFoundError):
                if (size := (run.path / _LOG).stat().st_size) == last_size:
                    continue
                last_size = size
                write_metrics(run)
                for line in run.metrics():
                    for warning in rules.check(line) if line["step"] >= rules.last_step else ():
                        on_note(warning)

    thread = threading.Thread(target=follow, name="follow-verl-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def last_probability_difference(run: RunDir) -> float | None:
    """Of the sampler's and the trainer's token probabilities, if the last step in verl's log measured it."""
    lines = _read_lines(run.path / _LOG, "data", dict)
    value = lines[-1]["data"].get(_FIGURES["probability_difference"]) if lines else None
    return value if _is_finite(value) else None


def archive_verl_log(run: RunDir) -> None:
    """Take the log of an interrupted run into ``metrics.jsonl``: verl overwrites its log in every process."""
    if (run.path / _LOG).exists():
        write_metrics(run)
        (run.path / _LOG).unlink()


def _is_finite(value: Any) -> bool:
    """Whether it is a number; verl logs null for one that is not finite, the mean of a step with a skipped update."""
    return isinstance(value, int | float) and math.isfinite(value)


def _read_lines(path: Path, key: str, kind: type) -> list[dict[str, Any]]:
    """The lines of a file with a step, and with a value of this kind; others are damaged."""
    lines = []
    with suppress(FileNotFoundError):
        for text in read_bytes(path, max_bytes=_MAX_BYTES).splitlines():
            with suppress(ValueError):  # a kill may truncate the last line
                line = parse_json(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get(key), kind):
                    lines.append(line)
    return lines
