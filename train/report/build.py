"""Builds a run's report: one HTML page that loads nothing, which a content security policy enforces.

The run is read twice, one step at a time. The first pass leaves a short note on every rollout, from which those are
chosen that the page shows; the second pass reads these, and shortens their texts, so the page stays small for any run.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from groundwire.adapters.tracing import calls_of_agents, trajectories
from groundwire.domains import gold_answer
from groundwire.tools.terminal import format_duration
from groundwire.train.algorithms.credit import token_credit
from groundwire.train.algorithms.health import warnings_by_step
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.evaluation.diagnosis import KINDS, Reason, credit_lines, diagnose
from groundwire.train.evaluation.metrics import format_accuracy, format_change
from groundwire.train.evaluation.run_reader import paired_changes, read_speed, settings_changes
from groundwire.train.evaluation.validation import VALIDATIONS
from groundwire.train.report.charts import Chart, charts, css_class, svg
from groundwire.train.report.token_text import TokenDecoder, token_decoder
from groundwire.train.report.turns import read_turns
from groundwire.train.store.rollout import Outcome, Rollout

_FOLDER = Path(__file__).parent
# They limit a page to about 540 rollouts with about 20 kB of text and 3,000 tokens each.
MAX_QUESTIONS = 150  # validation questions, before and after; those with a changed reward come first
MAX_STEPS = 30  # training steps, evenly spaced, with one group each: if possible one with unequal rewards
MAX_GROUP = 8  # rollouts per group
MAX_FAILURES = 10  # training rollouts per type of failure
MAX_CHARACTERS = 4000  # per text
MAX_TOKENS = 1500  # per trajectory, of its beginning and its end
MAX_TRAJECTORIES = 6  # per rollout
MAX_TURNS = 24  # per rollout

_SPEED = {
    "tokens_per_s_per_gpu": ("{:,.0f}", "tokens per second and GPU, prompts and replies"),
    "tokens_per_s_per_machine": ("{:,.0f}", "tokens per second of the machine, prompts and replies"),
    "update_mfu": ("{:.1%}", "MFU of updates"),
    "step_mfu": ("{:.1%}", "MFU of whole steps"),
    "gpu_idle_fraction": ("{:.1%}", "of the steps without a model at work"),
    "rollouts_per_s_per_core": ("{:.2g}", "rollouts per second and core"),
}
_CUT = " … "
_MAX_BADGE = 40  # characters of a task's column that is shown as a badge


class Report(NamedTuple):
    """The page and its charts."""

    html: str
    charts: Sequence[Chart]


def build(run: RunDir, *, live: str = "") -> Report:
    """The report of an active, stopped, killed or finished run. ``live`` is a script that reloads the page."""
    config, metrics = run.config(), run.metrics()
    unreadable: list[str] = []
    changes: Mapping[str, Mapping[str, Any]] = {}
    turn_charts, turn_lines = read_turns(run, unreadable)
    notes, lengths = _read_notes(run, unreadable, turn_lines)
    data = _rollout_data(run, choose(notes), token_decoder(run))
    drawn = [*charts(metrics, lengths), *turn_charts]
    with suppress(RunDirError):  # there is no validation yet, or the page's warnings name the file
        changes = paired_changes(run)
    html = render(
        data,
        title=f"{config.get('backend', 'agent')} on {config.get('domain', 'tasks')}, {run.path.name}",
        state=_state(config, metrics),
        warnings=[*unreadable, *settings_changes(run), *warnings_by_step(metrics)],
        tiles=[*_tiles(metrics, len(notes), changes), *_speed_tiles(read_speed(run) or {})],
        charts=drawn,
        reasons=[(KINDS[kind], count) for kind, count in Counter(note.reason.kind for note in notes).most_common()],
        total=len(notes),
        rest="The whole run is in its rollouts.parquet.",
        settings=json.dumps(config, indent=1, ensure_ascii=False, default=str),
        live=live,
    )
    return Report(html, drawn)


def render(data: Mapping[str, Any], *, charts: Sequence[Chart], **parts: Any) -> str:
    """The page of ``data``, tasks and rollouts; ``parts`` are the other values of its template."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    packed = gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        **{"reasons": [], "warnings": [], "lines": [], "settings": "", "live": "", **parts},
        charts=[(chart, svg(chart)) for chart in charts],
        css_class=css_class,
        shown=len(data["rollouts"]),
        data=base64.b64encode(packed).decode(),
        style=(_FOLDER / "page.css").read_text(),
        script=(_FOLDER / "page.js").read_text(),
    )


def _state(config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    step, steps = metrics[-1]["step"] if metrics else 0, config.get("steps")
    if steps and step < steps:
        progress = f"step {step} of {steps}: active or stopped"
    else:
        progress = f"{step} of {steps} steps" if steps else f"step {step}"
    return f"model {config.get('model', '?')} · seed {config.get('seed', 0)} · {progress}"


def _tiles(
    metrics: Sequence[Mapping[str, Any]], total: int, changes: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """The values at the top of the page, with their labels."""
    for key, way in VALIDATIONS.items():
        if results := [line[key] for line in metrics if key in line]:
            first, last = results[0], results[-1]
            low, high = last["ci95"]
            values = [format_accuracy(result["accuracy"]) for result in ([first, last] if len(results) > 1 else [last])]
            name = last.get("metric_name", "accuracy")
            change = f"; {format_change(changes[key])}" if key in changes else ""
            yield " → ".join(values), f"{way} {name}, of {last['n']} [{low:.2f}, {high:.2f}]{change}"
    yield f"{total:,}", "rollouts, with validation"
    yield f"{sum(sum(line.get('failures', {}).values()) for line in metrics):,}", "failed in training"
    if metrics and "wall_time_s" in metrics[-1]:
        yield format_duration(metrics[-1]["wall_time_s"]), "wall time"


def _speed_tiles(speed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((form.format(speed[key]), label) for key, (form, label) in _SPEED.items() if key in speed)
    if "device" in speed:
        yield speed["device"], f"{speed['gpus']} GPUs, {speed['cores']} cores. {speed.get('no_mfu', '')}"


class Note(NamedTuple):
    """What is known of a rollout after the first pass."""

    place: tuple[int, int]
    """Its batch, and its index in it."""
    rollout: Rollout
    """Without texts and calls."""
    reason: Reason
    credit: Sequence[str] = ()

    @property
    def task(self) -> str:
        """The id of its task."""
        return str(self.rollout.task["id"])


def _read_notes(
    run: RunDir, unreadable: list[str], turns: Mapping[str, Sequence[str]]
) -> tuple[list[Note], dict[int, dict[str, float]]]:
    """Read the whole run once: the notes, and for each step the mean tokens of its replies and prompts.

    ``turns`` are further lines of rollouts, by their ids.
    """
    notes: list[Note] = []
    lengths: dict[int, dict[str, float]] = {}
    for batch_index, batch in enumerate(run.rollout_batches(None, unreadable)):
        if calls := [call for rollout in batch if rollout.mode == "train" for call in rollout.trainable_calls]:
            lengths[batch[0].step] = {
                "reply": fmean(len(call.response_ids) for call in calls),
                "prompt": fmean(len(call.prompt_ids) for call in calls),
            }
        for index, (rollout, reason) in enumerate(zip(batch, diagnose(batch, run.config(batch[0].step)), strict=True)):
            outcome = Outcome(failure=rollout.outcome.failure, reward=rollout.outcome.reward)
            short = replace(rollout, task={"id": rollout.task["id"]}, outcome=outcome, calls=[])
            lines = [*credit_lines(rollout), *turns.get(rollout.rollout_id, ())]
            notes.append(Note((batch_index, index), short, reason, lines))
    return notes, lengths


def choose(notes: Sequence[Note]) -> list[Note]:
    """The notes of the shown rollouts, in the order of the run."""
    chosen = {note.place: note for note in (*_validation(notes), *_training(notes))}
    return [chosen[place] for place in sorted(chosen)]


def _rollout_data(run: RunDir, chosen: Sequence[Note], decoder: TokenDecoder) -> dict[str, Any]:
    """The page's data: ``tasks``, ``rollouts``, and the table of ``words`` (token id and text) that they refer to."""
    notes = {note.place: note for note in chosen}
    tasks: dict[str, dict[str, Any]] = {}
    rollouts: list[dict[str, Any]] = []
    words: dict[tuple[int, str], int] = {}
    for batch_index, batch in enumerate(run.rollout_batches(None, [])):  # a resumed run may have repeated a step since
        for index, rollout in enumerate(batch):
            if note := notes.get((batch_index, index)):
                tasks.setdefault(note.task, shown_task(rollout.task))
                spans = _token_spans(rollout, run.config(rollout.step).get("agent_match"))
                tokens = [_with_words(span, decoder, words) for span in spans]
                why = "" if rollout.mode == "val" and not rollout.outcome.failure else note.reason.text
                rollouts.append(shown_rollout(rollout, why, note.credit) | {"tokens": tokens})
    return {"tasks": tasks, "rollouts": rollouts, "words": list(words)}


def _training(notes: Sequence[Note]) -> Iterator[Note]:
    by_step: dict[int, dict[str, list[Note]]] = defaultdict(lambda: defaultdict(list))
    failures: Counter[str] = Counter()
    for note in notes:
        if note.rollout.mode != "train":
            continue
        by_step[note.rollout.step][note.rollout.group].append(note)
        if failure := note.rollout.outcome.failure:
            failures[failure] += 1
            if failures[failure] <= MAX_FAILURES:
                yield note
    for step in _evenly_spaced(sorted(by_step), MAX_STEPS):
        groups = list(by_step[step].values())
        unequal = [group for group in groups if len({note.rollout.outcome.reward for note in group}) > 1]
        yield from (unequal or groups)[0][:MAX_GROUP]


def _validation(notes: Sequence[Note]) -> Iterator[Note]:
    """The same questions before and after training, at the lowest temperature."""
    by_temperature: dict[float, dict[int, dict[str, Note]]] = defaultdict(lambda: defaultdict(dict))
    for note in notes:
        if note.rollout.mode == "val":
            by_temperature[note.rollout.sampling["temperature"]][note.rollout.step][note.task] = note
    if not by_temperature:
        return
    by_step = by_temperature[min(by_temperature)]
    before, after = by_step[min(by_step)], by_step[max(by_step)]
    rewards = {
        task: [by_task[task].rollout.outcome.reward for by_task in (before, after) if task in by_task]
        for task in before
    }
    changed = [task for task, values in rewards.items() if len(set(values)) > 1]
    others = [task for task in before if task not in set(changed)]
    for task in [*changed[:MAX_QUESTIONS], *_evenly_spaced(others, max(0, MAX_QUESTIONS - len(changed)))]:
        yield before[task]
        if task in after:
            yield after[task]


def _evenly_spaced(values: Sequence[Any], count: int) -> list[Any]:
    count = min(count, len(values))
    return [values[round(index * (len(values) - 1) / max(1, count - 1))] for index in range(count)]


def shown_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """A task on the page."""
    gold = gold_answer(task)
    texts = {name: value for name, value in task.items() if name not in ("id", "question") and value != gold}
    badges = {
        name: value
        for name, value in texts.items()
        if isinstance(value, str) and 0 < len(value) <= _MAX_BADGE and not Path(value).is_absolute()
    }
    return {"question": _shorten(str(task.get("question", ""))), "gold": _shorten(gold), "about": badges}


def shown_rollout(rollout: Rollout, why: str = "", credit: Sequence[str] = ()) -> dict[str, Any]:
    """A rollout on the page, without its tokens; ``why`` it taught nothing, and what its calls were trained with."""
    outcome = rollout.outcome
    return {
        "id": rollout.rollout_id,
        "task": str(rollout.task["id"]),
        "step": rollout.step,
        "mode": rollout.mode,
        "temperature": rollout.sampling.get("temperature"),
        "status": outcome.status,
        "reward": outcome.reward,
        **{name: _shorten(getattr(outcome, name)) for name in ("message", "answer", "input")},
        "reward_components": dict(outcome.reward_components),
        "why": why,
        "credit": credit,
        "seconds": round(rollout.seconds, 2),
        "judged_field": outcome.judged_field,
        "turns": [
            {**step, "input": _shorten(step["input"]), "output": _shorten(step["output"])}
            for step in outcome.steps[:MAX_TURNS]
        ],
    }


def _token_spans(rollout: Rollout, agent_match: str | None) -> list[list[Any]]:
    """For each trajectory its spans ``[mask, ids]``: with loss (1) or without (0); in validation, sampled or not.

    ``[-1, [n]]`` stands for n tokens that are left out.
    """
    calls = rollout.trainable_calls
    credits = {(call.sequence, call.choice): call.credit for call in calls if call.credit}
    spans = []
    for trajectory in trajectories(calls_of_agents(calls, agent_match))[:MAX_TRAJECTORIES]:
        mask = token_credit(trajectory, credits)[0] if credits else trajectory.loss_mask
        ids = trajectory.prompt_ids + trajectory.response_ids
        spans.append(_spans(ids, [0] * len(trajectory.prompt_ids) + mask))
    return spans


def _with_words(spans: list[list[Any]], decoder: TokenDecoder, words: dict[tuple[int, str], int]) -> list[list[Any]]:
    """``spans`` with each token id replaced by its index in ``words``, to which new ones are added."""
    ids = [token_id for mask, span in spans if mask >= 0 for token_id in span]
    indices = iter([words.setdefault(pair, len(words)) for pair in zip(ids, decoder.pieces(ids), strict=True)])
    return [[mask, span if mask < 0 else [next(indices) for _ in span]] for mask, span in spans]


def _spans(ids: Sequence[int], mask: Sequence[int]) -> list[list[Any]]:
    left_out = len(ids) - MAX_TOKENS
    if left_out > 0:
        head, tail = MAX_TOKENS // 4, MAX_TOKENS // 4 + left_out
        return [*_spans(ids[:head], mask[:head]), [-1, [left_out]], *_spans(ids[tail:], mask[tail:])]
    by_mask = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
    return [[in_loss, [token_id for token_id, _ in run]] for in_loss, run in by_mask]


def _shorten(text: str) -> str:
    """The beginning and the end of a text."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}{_CUT}({len(text) - 2 * half:,} characters){_CUT}{text[-half:]}"
