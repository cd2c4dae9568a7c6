"""Reads a run of training or an evaluation: its validations, their changes, its speed, its summary. Needs no torch."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from groundwire import domains
from groundwire.domains import Breakdowns, Domain
from groundwire.tools.errors import UserError
from groundwire.tools.files import shorten_repr
from groundwire.tools.secrets import mask_secrets
from groundwire.train.algorithms.speed import no_mfu
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir, RunDirError
from groundwire.train.config.overrides import flat
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.metrics import baseline, compare, compute_metrics, scores_by_question
from groundwire.train.evaluation.validation import validation_name
from groundwire.train.step_timer import PHASES
from groundwire.train.store.rollout import Rollout

Rollouts = list[Rollout]
_PARTS = {
    "parts.agent": "another source code of the agent",
    "parts.reward": "another source code of the reward",
    "parts.training tasks": "other training tasks",
}
_PAIRED = ("mode", "step", "temperature", "task_id", "status", "reward", "turn_scores")


def table_entry(run: RunDir, domain: Domain | None = None) -> dict[str, Any]:
    """A run as a row of :func:`groundwire.train.evaluate.table`. Without ``domain`` it is the one that the run names.

    ``before`` and ``after`` are the metrics of :func:`first_and_last`, of the trained agents' calls, and ``change``
    compares them. ``context`` are the characters of schema and results in prompts (``2048``, or ``4000 / 72``).
    """
    config = run.config()
    breakdowns: Breakdowns = {}
    with suppress(UserError):  # the domain may be a plugin that is not installed here
        breakdowns = (domain or domains.get(str(config.get("domain")))).breakdowns
    before, after = first_and_last(run)
    match, options = config.get("agent_match"), config.get("agent_options") or {}
    limits = [options.get(name) for name in ("table_info_truncate", "execution_truncate")]
    agents = sorted({call.agent for rollout in [*before, *after] for call in rollout.trainable_calls if call.agent})
    for rollout in [*before, *after]:
        rollout.calls = [call for call in rollout.calls if re.search(match or "", call.agent)]
    return {
        "run": run.path.name,
        "model": model_name(str(config.get("model"))),
        "backend": config.get("backend"),
        "context": " / ".join(dict.fromkeys(str(limit) for limit in limits if limit is not None)),
        "max_turns": options.get("max_turns"),
        "agents": match or ", ".join(agents) or "-",
        "before": compute_metrics(before, breakdowns) if before else None,
        "after": compute_metrics(after, breakdowns),
        "change": summarize_change(before, after),
        "speed": read_speed(run),
    }


def final_rollouts(run: RunDir) -> Rollouts:
    """The rollouts of a run's last full validation. Raises as :func:`first_and_last` does."""
    return first_and_last(run)[1]


def rollout_named(run: RunDir, beginning: str) -> str:
    """The id of the one rollout that begins so, or is just this. Raises :class:`RunDirError` if none or several are."""
    names = [rollout.rollout_id for rollout in run.rollouts(["rollout_id"])[0]]
    names = [name for name in names if name.startswith(beginning)]
    if beginning not in names and len(names) != 1:
        problem = f"{len(names)} rollouts that begin with" if names else "no rollout"
        raise RunDirError(f"{run.path} has {problem} {beginning!r:.60}; report.html and rollouts.parquet have the ids")
    return beginning if beginning in names else names[0]


def read_answers(run: RunDir) -> tuple[dict[str, list[str]], list[str]]:
    """The answers of all rollouts that ended, by the id of their task, and messages about files that cannot be read."""
    unreadable: list[str] = []
    answers: defaultdict[str, list[str]] = defaultdict(list)
    for rollouts in run.rollout_batches(("task_id", "status", "answer"), unreadable):
        for rollout in rollouts:
            if not rollout.outcome.failure and rollout.outcome.answer:
                answers[str(rollout.task["id"])].append(rollout.outcome.answer)
    return answers, unreadable


def model_name(model: str) -> str:
    """The run and step of a checkpoint, the name of another folder, or the model's name."""
    path = Path(model)
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.name}"
    return path.name if path.is_dir() else model


def first_and_last(run: RunDir) -> tuple[Rollouts, Rollouts]:
    """The first validation, empty if it is the only one, and the last with as many rollouts: those at the lowest
    temperature. Raises :class:`RunDirError`.
    """
    by_temperature = _validations(run)
    return _ends(by_temperature[min(by_temperature)])


def paired_changes(run: RunDir) -> dict[str, dict[str, Any]]:
    """The last full validation against the first, question by question, by their name in metrics and summaries.

    Empty without two of them. Raises :class:`RunDirError`.
    """
    validations = _validations(run, _PAIRED).items()
    changes = {validation_name(temperature): summarize_change(*_ends(by_step)) for temperature, by_step in validations}
    return {name: change for name, change in changes.items() if change}


def settings_changes(run: RunDir) -> list[str]:
    """A line for each time that the run was resumed with other settings or parts."""
    lines = []
    for earlier in run.config().get("earlier", []):
        changed = changed_names(earlier["settings"], run.config(earlier["last_step"] + 1))
        lines.append(f"after step {earlier['last_step']} the run was resumed with {', '.join(changed.values())}")
    return lines


def changed_names(former: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """What changed, with a text for the user, by name: settings, those of a table one by one, and the run's parts."""
    old, new = dict(flat(former)), dict(flat({name: now.get(name) for name in former}))
    return {
        name: _PARTS.get(name)
        or mask_secrets(f"{name} {shorten_repr(new.get(name))} (was {shorten_repr(old.get(name))})")
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    }


def summarize_change(before: Rollouts, after: Rollouts) -> dict[str, Any] | None:
    """The part of a comparison that a summary has, of the answers ``after`` against the :func:`baseline` of ``before``;
    None if they share no question, as where ``before`` is empty.
    """
    scores, name = baseline(before)
    try:
        compared = compare(scores, scores_by_question(after))
    except ValueError:
        return None
    kept = {key: compared[key] for key in ("difference", "difference_ci95")}
    return {"baseline": name, **kept, "paired_questions": compared["questions"]}


def _ends(by_step: Mapping[int, Rollouts]) -> tuple[Rollouts, Rollouts]:
    first = min(by_step)  # of all tasks; those during training may have fewer
    last = max(step for step, rollouts in by_step.items() if len(rollouts) >= len(by_step[first]))
    return ([] if last == first else by_step[first]), by_step[last]


def _validations(run: RunDir, columns: Sequence[str] | None = None) -> dict[float, dict[int, Rollouts]]:
    """The rollouts of each validation, by temperature and step.

    Raises :class:`RunDirError` if there is none, or a file cannot be read: the others would not be comparable.
    """
    unreadable: list[str] = []
    validations: dict[float, dict[int, Rollouts]] = defaultdict(lambda: defaultdict(list))
    for batch in run.rollout_batches(columns, unreadable):
        if rollouts := [rollout for rollout in batch if rollout.mode == "val"]:
            validations[rollouts[0].sampling["temperature"]][rollouts[0].step] += rollouts
    if missing := [message for message in unreadable if "-train.parquet" not in message]:
        raise RunDamagedError(f"{run.path} cannot be evaluated: {missing[0]}")
    if not validations:
        raise RunDirError(f"{run.path} has no validation yet")
    return validations


def read_speed(run: RunDir) -> dict[str, Any] | None:
    """The run's ``gpus`` (None: unknown), ``steps``, ``hours`` and ``seconds_per_step``, the shares of rollout and
    update in the steps (None: unknown), and the figures of :func:`.step_speed`. None for a run without a step.
    """
    lines = run.metrics()
    steps = [line for line in lines if line["step"] > 0 and "seconds" in line]
    if not steps:
        return None
    total_s, rollout_s, update_s = map(sum, zip(*map(_step_times, steps), strict=True))
    machine, why = steps[-1].get("machine", {}), no_mfu(steps[-1])
    speed: dict[str, float] = {}
    for name in dict.fromkeys(name for line in steps for name in line.get("speed", {})):
        of_name = [(line["speed"][name], _step_times(line)) for line in steps if name in line.get("speed", {})]
        weighted = [(value, times[2 if name == "update_mfu" else 0]) for value, times in of_name]
        if weight := sum(seconds for _, seconds in weighted):
            speed[name] = float(f"{sum(value * seconds for value, seconds in weighted) / weight:.4g}")
    return {
        "gpus": machine.get("gpus"),
        "steps": len(steps),
        "hours": round(lines[-1].get("wall_time_s", 0.0) / 3600, 3),
        "seconds_per_step": round(total_s / len(steps), 2),
        "rollout_share": round(rollout_s / total_s, 4) if total_s else None,
        "update_share": round(update_s / total_s, 4) if total_s else None,
        **{name: machine[name] for name in ("device", "cores") if name in machine},
        **speed,
        **({"no_mfu": why} if why else {}),
    }


def _step_times(line: Mapping[str, Any]) -> tuple[float, ...]:
    """Seconds of a step, of its rollouts and of its update. Without verl all but the update is for the rollouts."""
    if "verl" in line:
        return tuple(float(line["verl"].get(f"timing_s/{name}") or 0.0) for name in ("step", "gen", "update_actor"))
    total, update = sum(line["seconds"].values()), line["seconds"].get("update", 0.0)
    return total, total - update, update


def summarize(run: RunDir, config: RunConfig, source: str, *, note: str = "") -> dict[str, Any]:
    """The content of ``summary.json``, from the metrics so far; ``source`` describes the data."""
    lines = run.metrics()
    steps = [line for line in lines if line["step"] > 0]
    failures = sum((Counter(line["failures"]) for line in steps), Counter[str]())
    some = {
        name: sum(line.get(name, 0) for line in lines) for name in ("without_calls", "known_attacks", "runners_lost")
    }
    seconds = {phase: sum(line["seconds"][phase] for line in steps) for phase in PHASES}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in kB, on macOS in bytes
    summary: dict[str, Any] = {
        "data": source,
        **{name: getattr(config, name) for name in ("backend", "domain", "model", "seed")},
        "steps": steps[-1]["step"] if steps else 0,
        "wall_time_s": lines[-1]["wall_time_s"] if lines else 0.0,
        "peak_memory_mb": round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1),
        "rollouts": sum(line["rollouts"] for line in steps),
        "failures": dict(failures),
        **{name: count for name, count in some.items() if count},
        "validation": before_after(lines, "validation"),
        "validation_sampled": before_after(lines, "validation_sampled"),
        "seconds": {phase: round(value, 2) for phase, value in seconds.items()},
        "speed": read_speed(run),
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


def before_after(lines: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The full validations before and after training, with their breakdowns; a stopped run has no ``after``."""
    validations = [line[name] for line in lines if name in line]
    if not validations:
        return {}
    before, after = validations[0], validations[-1]
    full = {"before": before}
    if after is not before and after["total"] == before["total"]:  # validations during training have fewer tasks
        full["after"] = after
    result = {"n": before["n"]}
    for when, validation in full.items():
        result[when], result[f"{when}_ci95"] = validation["accuracy"], validation["ci95"]
        result[f"{when}_first_query"] = validation.get("first_query_accuracy")
        for key in validation:
            if key.startswith("by_"):
                result[f"{when}_{key}"] = {value: metrics["accuracy"] for value, metrics in validation[key].items()}
    return result
