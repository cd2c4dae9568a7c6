"""Which rollouts a report shows, and how much of each: a page must stay a page, however long the run was.

The run is read twice, a step at a time. The first time its figures are made and every rollout leaves a short note; from
the notes a choice is made. The second time the chosen ones are read again, texts and tokens cut to what a person reads.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groundwire.adapters.tracing import LLMCall, calls_of_agents, trajectories, triplets
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.diagnosis import KINDS, diagnose
from groundwire.train.report.token_text import TokenDecoder

__all__ = ["Limits", "Notes", "choose", "counted_reasons", "read", "rollout_data"]

_CUT = " … "


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a page's size: about 540 rollouts, and of each about 20 kB of text and 3,000 tokens."""

    questions: int = 150
    """Validation questions, before and after; those whose outcome changed come first."""
    steps: int = 30
    """Training steps, evenly spread, that one group is shown of; where there is one, of unequal rewards."""
    group: int = 8
    """Rollouts of such a group."""
    failures: int = 10
    """Training rollouts for each type of failure."""
    characters: int = 4000
    """Of any one text."""
    tokens: int = 1500
    """Of a trajectory: its beginning and its end."""
    trajectories: int = 6
    """Of a rollout."""
    turns: int = 24
    """Of a rollout."""


@dataclass
class Notes:
    """What the first reading leaves."""

    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """One short note for each: where it is, and what became of it."""
    reasons: Counter[str] = field(default_factory=Counter)
    lengths: dict[int, dict[str, float]] = field(default_factory=dict)
    reward_components: dict[int, dict[str, float]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


def read(run: RunDir, *, agent_match: str | None, trainer: str) -> Notes:
    """Read the whole run once. A run without a rollout leaves empty notes."""
    notes = Notes()
    for number, batch in enumerate(run.rollout_batches(None, notes.damaged)):
        reasons = diagnose(batch, agent_match=agent_match, trainer=trainer)
        for place, (row, reason) in enumerate(zip(batch, reasons, strict=True)):
            notes.reasons[reason.kind] += 1
            names = ("step", "mode", "temperature", "group", "task_id", "status", "reward")
            note = {name: row[name] for name in names}
            notes.rollouts.append(note | {"batch": number, "place": place, "why": reason.text})
        training = [row for row in batch if row["mode"] == "train"]
        if training:
            step = int(training[0]["step"])
            _mean_into(notes.lengths, step, [_lengths(call) for row in training for call in row["calls"] or ()])
            _mean_into(
                notes.reward_components,
                step,
                [json.loads(row["reward_components"]) for row in training if row["reward"] is not None],
            )
    return notes


def choose(notes: Sequence[Mapping[str, Any]], limits: Limits) -> list[Mapping[str, Any]]:
    """The rollouts that are shown, in the order of the run."""
    chosen = {(note["batch"], note["place"]): note for note in _chosen(notes, limits)}
    return [chosen[key] for key in sorted(chosen)]


def rollout_data(
    run: RunDir, chosen: Sequence[Mapping[str, Any]], words: TokenDecoder, *, agent_match: str | None, limits: Limits
) -> dict[str, Any]:
    """What the page's script reads: ``tasks``, ``rollouts``, and the ``words`` (id and text) that their tokens are."""
    wanted: dict[int, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for note in chosen:
        wanted[note["batch"]][note["place"]] = note
    tasks: dict[str, dict[str, Any]] = {}
    rollouts: list[dict[str, Any]] = []
    table: dict[tuple[int, str], int] = {}
    for number, batch in enumerate(run.rollout_batches(None, [])):
        for place, note in wanted.get(number, {}).items():
            if place >= len(batch):  # the run went on, and did a step again
                continue
            row = batch[place]
            task = json.loads(row["task"])
            tasks.setdefault(row["task_id"], _task(task, limits))
            made = _rollout(row, note["why"], limits)
            made["tokens"] = [_in_table(runs, words, table) for runs in _tokens(row, agent_match, limits)]
            rollouts.append(made)
    return {"tasks": tasks, "rollouts": rollouts, "words": list(table)}


def _chosen(notes: Sequence[Mapping[str, Any]], limits: Limits) -> Iterator[Mapping[str, Any]]:
    yield from _validated(notes, limits)
    training = [note for note in notes if note["mode"] == "train"]
    steps = sorted({note["step"] for note in training})
    for step in _spread(steps, limits.steps):
        groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for note in training:
            if note["step"] == step:
                groups[note["group"]].append(note)
        unequal = [group for group in groups.values() if len({note["reward"] for note in group}) > 1]
        yield from next(iter(unequal or groups.values()))[: limits.group]
    failed: Counter[str] = Counter()
    for note in training:
        if note["reward"] is None:
            failed[note["status"]] += 1
            if failed[note["status"]] <= limits.failures:
                yield note


def _validated(notes: Sequence[Mapping[str, Any]], limits: Limits) -> Iterator[Mapping[str, Any]]:
    """Before and after of the same questions, at the lowest temperature that was validated at."""
    validated = [note for note in notes if note["mode"] == "val"]
    if not validated:
        return
    coldest = min(note["temperature"] for note in validated)
    by_step: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for note in validated:
        if note["temperature"] == coldest:
            by_step[note["step"]][note["task_id"]] = note
    steps = sorted(by_step)
    before, after = by_step[steps[0]], by_step[steps[-1]]
    both = [task for task in before if task in after]
    changed = [task for task in both if before[task]["reward"] != after[task]["reward"]]
    rest = [task for task in before if task not in changed]
    for task in [*changed[: limits.questions], *_spread(rest, max(0, limits.questions - len(changed)))]:
        yield before[task]
        if task in after:
            yield after[task]


def _spread(values: Sequence[Any], count: int) -> list[Any]:
    if len(values) <= count:
        return list(values)
    if count < 2:
        return list(values[:count])
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]


def _task(task: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    shown = {name: str(task[name]) for name in ("db_id", "hardness", "subject", "subject_split") if task.get(name)}
    gold = next((str(task[name]) for name in ("query", "gold", "answer") if task.get(name)), "")
    return {"question": _cut(str(task["question"]), limits), "gold": _cut(gold, limits), "about": shown}


def _rollout(row: Mapping[str, Any], why: str, limits: Limits) -> dict[str, Any]:
    return {
        "id": row["rollout_id"],
        "task": row["task_id"],
        "step": row["step"],
        "mode": row["mode"],
        "temperature": row["temperature"],
        "status": row["status"],
        "message": _cut(row["message"] or "", limits),
        "reward": row["reward"],
        "reward_components": json.loads(row["reward_components"]),
        "why": "" if row["mode"] == "val" and row["reward"] is not None else why,
        "seconds": round(row["seconds"], 2),
        "answer": _cut(row["answer"] or "", limits),
        "turns": [
            {
                "agent": step["agent"],
                "kind": step["kind"],
                "input": _cut(step["input"], limits),
                "output": _cut(step["output"], limits),
                "ok": step["ok"],
            }
            for step in json.loads(row["agent_steps"] or "[]")[: limits.turns]
        ],
    }


def _tokens(row: Mapping[str, Any], agent_match: str | None, limits: Limits) -> list[list[Any]]:
    """For each trajectory its runs of tokens: ``[sampled, ids]``, where ``sampled`` is 1 for what carries a loss.

    A run of ``[-1, [n]]`` stands for n tokens that were left out.
    """
    calls = [
        LLMCall(
            rollout_id=row["rollout_id"],
            attempt_id="",
            sequence=place,
            agent=call["agent"] or "",
            prompt_ids=list(call["prompt_ids"]),
            response_ids=list(call["response_ids"]),
            logprobs=list(call["logprobs"]),
        )
        for place, call in enumerate(row["calls"] or ())
    ]
    made = trajectories(triplets(calls_of_agents(calls, agent_match), row["reward"]))[: limits.trajectories]
    return [
        _runs(each.prompt_ids + each.response_ids, [0] * len(each.prompt_ids) + each.loss_mask, limits) for each in made
    ]


def _in_table(runs: list[list[Any]], words: TokenDecoder, table: dict[tuple[int, str], int]) -> list[list[Any]]:
    """``runs`` with each token as its place in ``table``, which grows."""
    ids = [token for sampled, part in runs if sampled >= 0 for token in part]
    places = iter([table.setdefault(pair, len(table)) for pair in zip(ids, words.pieces(ids), strict=True)])
    return [[sampled, part if sampled < 0 else [next(places) for _ in part]] for sampled, part in runs]


def _runs(ids: Sequence[int], mask: Sequence[int], limits: Limits) -> list[list[Any]]:
    left_out = max(0, len(ids) - limits.tokens)
    head = limits.tokens // 4 if left_out else len(ids)
    runs: list[list[Any]] = []
    for place, (token, sampled) in enumerate(zip(ids, mask, strict=True)):
        if head <= place < head + left_out:
            if place == head:
                runs.append([-1, [left_out]])
            continue
        if not runs or runs[-1][0] != sampled:
            runs.append([sampled, []])
        runs[-1][1].append(token)
    return runs


def _cut(text: str, limits: Limits) -> str:
    """The beginning and the end of a text."""
    if len(text) <= limits.characters:
        return text
    half = limits.characters // 2
    return f"{text[:half]}{_CUT}({len(text) - 2 * half:,} characters){_CUT}{text[-half:]}"


def _lengths(call: Mapping[str, Any]) -> dict[str, float]:
    return {"reply": len(call["response_ids"]), "prompt": len(call["prompt_ids"])}


def _mean_into(result: dict[int, dict[str, float]], step: int, values: Sequence[Mapping[str, float]]) -> None:
    names = dict.fromkeys(name for each in values for name in each)
    if names:
        result[step] = {
            name: sum(each[name] for each in values if name in each) / sum(name in each for each in values)
            for name in names
        }


def counted_reasons(notes: Notes) -> list[tuple[str, int]]:
    """How many rollouts of each kind of :data:`groundwire.train.evaluation.diagnosis.KINDS`, most first."""
    return [(KINDS[kind], count) for kind, count in notes.reasons.most_common()]
