"""Chooses the rollouts that a report shows, and shortens their texts, so the page stays small for any run.

The run is read twice, one step at a time. The first pass computes the report's means and leaves a short note on every
rollout, from which the shown ones are chosen; the second pass reads these.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groundwire.adapters.tracing import calls_of_agents, trajectories
from groundwire.domains import gold_answer
from groundwire.train.algorithms.credit import token_credit
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.run_files import ROLLOUT_COLUMNS
from groundwire.train.evaluation.credits import credit_lines
from groundwire.train.evaluation.diagnosis import diagnose
from groundwire.train.report.token_text import TokenDecoder
from groundwire.train.store.rows import from_row

__all__ = ["RunNotes", "choose", "read_notes", "rollout_data"]

# They limit a page to about 540 rollouts with about 20 kB of text and 3,000 tokens each.
MAX_QUESTIONS = 150  # validation questions, before and after; those with a changed reward come first
MAX_STEPS = 30  # training steps, evenly spaced, with one group each: if possible one with unequal rewards
MAX_GROUP = 8  # rollouts per group
MAX_FAILURES = 10  # training rollouts per type of failure
MAX_CHARACTERS = 4000  # per text
MAX_TOKENS = 1500  # per trajectory, of its beginning and its end
MAX_TRAJECTORIES = 6  # per rollout
MAX_TURNS = 24  # per rollout

_CUT = " … "
_MAX_ABOUT = 40  # characters of a task's column that is shown as a badge

Note = Mapping[str, Any]


@dataclass
class RunNotes:
    """The result of the first pass. ``lengths`` and ``reward_components`` are means per step."""

    rollouts: list[dict[str, Any]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """Rollouts per kind of :data:`groundwire.train.evaluation.diagnosis.KINDS`."""
    lengths: dict[int, dict[str, float]] = field(default_factory=dict)
    reward_components: dict[int, dict[str, float]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)


def read_notes(run: RunDir) -> RunNotes:
    """Read the whole run once."""
    notes = RunNotes()
    columns = ("step", "mode", "temperature", "group", "task_id", "status", "reward")
    for batch_index, batch in enumerate(run.rollout_batches(ROLLOUT_COLUMNS, notes.unreadable)):
        reasons = diagnose(batch, run.config(batch[0]["step"]))
        for index, (row, reason) in enumerate(zip(batch, reasons, strict=True)):
            notes.reasons[reason.kind] += 1
            note = {name: row[name] for name in columns}
            note |= {"why": reason.text, "credit": list(credit_lines(row))}
            notes.rollouts.append(note | {"batch": batch_index, "index": index})
        if training := [row for row in batch if row["mode"] == "train"]:
            step = int(training[0]["step"])
            lengths = [
                {"reply": len(call["response_ids"]), "prompt": len(call["prompt_ids"])}
                for row in training
                for call in row["calls"] or ()
            ]
            components = [json.loads(row["reward_components"]) for row in training if row["reward"] is not None]
            for means, values in ((notes.lengths, lengths), (notes.reward_components, components)):
                if mean := _means(values):
                    means[step] = mean
    return notes


def choose(notes: Sequence[Note]) -> list[Note]:
    """The notes of the shown rollouts, in the order of the run."""
    chosen = {(note["batch"], note["index"]): note for note in (*_validation(notes), *_training(notes))}
    return [chosen[key] for key in sorted(chosen)]


def rollout_data(run: RunDir, chosen: Sequence[Note], decoder: TokenDecoder) -> dict[str, Any]:
    """The page's data: ``tasks``, ``rollouts``, and the table of ``words`` (token id and text) that they refer to."""
    wanted: dict[int, dict[int, Note]] = defaultdict(dict)
    for note in chosen:
        wanted[note["batch"]][note["index"]] = note
    tasks: dict[str, dict[str, Any]] = {}
    rollouts: list[dict[str, Any]] = []
    words: dict[tuple[int, str], int] = {}
    for batch_index, batch in enumerate(run.rollout_batches(ROLLOUT_COLUMNS, [])):
        for index, note in wanted.get(batch_index, {}).items():
            if index >= len(batch):  # the run was resumed meanwhile, and repeated a step
                continue
            row = batch[index]
            tasks.setdefault(row["task_id"], _task(json.loads(row["task"])))
            match = run.config(row["step"]).get("agent_match")
            tokens = [_with_words(spans, decoder, words) for spans in _token_spans(row, match)]
            rollouts.append(_rollout(row, note["why"]) | {"credit": note["credit"], "tokens": tokens})
    return {"tasks": tasks, "rollouts": rollouts, "words": list(words)}


def _training(notes: Sequence[Note]) -> Iterator[Note]:
    by_step: dict[int, dict[str, list[Note]]] = defaultdict(lambda: defaultdict(list))
    failures: Counter[str] = Counter()
    for note in notes:
        if note["mode"] != "train":
            continue
        by_step[note["step"]][note["group"]].append(note)
        if note["status"] != "succeeded":
            failures[note["status"]] += 1
            if failures[note["status"]] <= MAX_FAILURES:
                yield note
    for step in _evenly_spaced(sorted(by_step), MAX_STEPS):
        groups = list(by_step[step].values())
        unequal = [group for group in groups if len({note["reward"] for note in group}) > 1]
        yield from (unequal or groups)[0][:MAX_GROUP]


def _validation(notes: Sequence[Note]) -> Iterator[Note]:
    """The same questions before and after training, at the lowest temperature."""
    validation = [note for note in notes if note["mode"] == "val"]
    if not validation:
        return
    lowest = min(note["temperature"] for note in validation)
    by_step: dict[int, dict[str, Note]] = defaultdict(dict)
    for note in validation:
        if note["temperature"] == lowest:
            by_step[note["step"]][note["task_id"]] = note
    before, after = by_step[min(by_step)], by_step[max(by_step)]
    changed = [task for task in before if task in after and before[task]["reward"] != after[task]["reward"]]
    others = [task for task in before if task not in set(changed)]
    free = max(0, MAX_QUESTIONS - len(changed))
    for task in [*changed[:MAX_QUESTIONS], *_evenly_spaced(others, free)]:
        yield before[task]
        if task in after:
            yield after[task]


def _evenly_spaced(values: Sequence[Any], count: int) -> list[Any]:
    if len(values) <= count:
        return list(values)
    if count < 2:
        return list(values[:count])
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def _task(task: Mapping[str, Any]) -> dict[str, Any]:
    gold = gold_answer(task)
    texts = {name: value for name, value in task.items() if name not in ("id", "question") and value != gold}
    about = {
        name: value
        for name, value in texts.items()
        if isinstance(value, str) and 0 < len(value) <= _MAX_ABOUT and not Path(value).is_absolute()
    }
    return {"question": _shorten(str(task.get("question", ""))), "gold": _shorten(gold), "about": about}


def _rollout(row: Mapping[str, Any], why: str) -> dict[str, Any]:
    return {
        "id": row["rollout_id"],
        "task": row["task_id"],
        **{name: row[name] for name in ("step", "mode", "temperature", "status", "reward")},
        "message": _shorten(row["message"] or ""),
        "reward_components": json.loads(row["reward_components"]),
        "why": "" if row["mode"] == "val" and row["status"] == "succeeded" else why,
        "seconds": round(row["seconds"], 2),
        "answer": _shorten(row["answer"] or ""),
        "input": _shorten(row.get("input") or ""),
        "judged_field": row.get("judged_field") or "",
        "turns": [
            {
                **{name: step[name] for name in ("agent", "kind", "ok")},
                "input": _shorten(step["input"]),
                "output": _shorten(step["output"]),
            }
            for step in json.loads(row["agent_steps"] or "[]")[:MAX_TURNS]
        ],
    }


def _token_spans(row: Mapping[str, Any], agent_match: str | None) -> list[list[Any]]:
    """For each trajectory its spans ``[mask, ids]``: with loss (1) or without (0); in validation, sampled or not.

    ``[-1, [n]]`` stands for n tokens that are left out.
    """
    calls = from_row(row).trainable_calls
    shown = trajectories(calls_of_agents(calls, agent_match))[:MAX_TRAJECTORIES]
    credits = {(call.sequence, call.choice): call.credit for call in calls if call.credit}
    spans = []
    for each in shown:
        mask = token_credit(each, credits)[0] if credits else each.loss_mask
        spans.append(_spans(each.prompt_ids + each.response_ids, [0] * len(each.prompt_ids) + mask))
    return spans


def _with_words(spans: list[list[Any]], decoder: TokenDecoder, words: dict[tuple[int, str], int]) -> list[list[Any]]:
    """``spans`` with each token id replaced by its index in ``words``, to which new ones are added."""
    ids = [token_id for mask, part in spans if mask >= 0 for token_id in part]
    indices = iter([words.setdefault(pair, len(words)) for pair in zip(ids, decoder.pieces(ids), strict=True)])
    return [[mask, part if mask < 0 else [next(indices) for _ in part]] for mask, part in spans]


def _spans(ids: Sequence[int], mask: Sequence[int]) -> list[list[Any]]:
    left_out = max(0, len(ids) - MAX_TOKENS)
    head = MAX_TOKENS // 4 if left_out else len(ids)
    spans: list[list[Any]] = []
    for index, (token_id, in_loss) in enumerate(zip(ids, mask, strict=True)):
        if head <= index < head + left_out:
            if index == head:
                spans.append([-1, [left_out]])
            continue
        if not spans or spans[-1][0] != in_loss:
            spans.append([in_loss, []])
        spans[-1][1].append(token_id)
    return spans


def _shorten(text: str) -> str:
    """The beginning and the end of a text."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}{_CUT}({len(text) - 2 * half:,} characters){_CUT}{text[-half:]}"


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the values that have it."""
    collected: dict[str, list[float]] = {}
    for each in values:
        for name, value in each.items():
            collected.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in collected.items()}
