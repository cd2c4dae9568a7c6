"""Tasks and a reward from traces: ``groundwire traces FILE --write DIR``.

A task is a first user turn, with the inputs of the agent that differ. Its reward compares an answer with those that
were accepted and rejected: by an exported score, else by what happened afterwards; else a judge is drafted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from groundwire.domains.held_out import question_key, together
from groundwire.tools.errors import CommandError
from groundwire.tools.terminal import counted
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.read import Traces
from groundwire.train.traces.record import plain

_ANSWERS, _HELD_OUT = 8, 0.2
_DRAFT = "a DRAFT, a judge with a rubric that nobody has checked: no score, error or correction tells answers apart"
_BY_OUTCOME = "by what happened: rejected where a tool or the agent failed, or the user's next turn corrects it"
_BANDS, _ROWS, _SHINGLE = 4, 12, 5
"""Near duplicates: of texts with nine tenths of their 5-letter pieces in common, one of four MinHashes is the same."""


@dataclass
class _Task:
    question: str
    inputs: Mapping[str, Any]
    started: float
    number: int
    answers: list[tuple[str, Mapping[str, float], bool]] = field(default_factory=list)
    """Each with its scores, and whether nothing speaks against it."""


@dataclass
class WrittenTasks:
    """What was written."""

    lines: list[str]
    """For the user."""
    is_draft: bool
    """Whether the reward is a draft of a judge."""
    rule: str
    """How answers are told apart, in words; empty if nothing does."""
    accepts: Callable[[Rollout], bool | None]
    """Whether the answer of a trace is accepted; None where the rule says nothing of it."""
    splits: Mapping[str, str]
    """The split of each task, by :func:`question_key`."""


def write_tasks(folder: Path, rollouts: Iterable[Rollout]) -> WrittenTasks:
    """Write ``tasks.jsonl`` and ``reward.py`` into ``folder``. Raises :class:`CommandError`."""
    for name in ("tasks.jsonl", "reward.py"):
        if (folder / name).exists():
            raise CommandError(f"{folder / name} exists: nothing is overwritten; give another folder")
    tasks, left_out, prompts = _collect(rollouts)
    how, accepts = _judged_by(tasks)
    rows = []
    for task in sorted(tasks.values(), key=lambda task: (task.started, task.number)):
        row: dict[str, Any] = {"question": task.question, **task.inputs}
        verdicts = [(answer, accepts(scores, good)) for answer, scores, good in task.answers]
        if how:
            row["expected"] = list(dict.fromkeys(answer for answer, verdict in verdicts if verdict is True))
            row["rejected"] = list(dict.fromkeys(answer for answer, verdict in verdicts if verdict is False))
            if not row["expected"]:
                left_out["tasks without an accepted answer"] += 1
                continue
        else:
            row["recorded_answer"] = task.answers[0][0] if task.answers else ""
        rows.append((row, task.started))
    if not rows:
        reasons = left_out + (rollouts.unread if isinstance(rollouts, Traces) else Counter())
        listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        raise CommandError(f"the traces have no task: {listed or 'they are empty'}")
    lines = [f"{folder / 'tasks.jsonl'}: {_divide(rows)}"]
    lines += [f"    left out: {count:,} {reason}" for reason, count in left_out.items()]
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row, _ in rows)
    (folder / "tasks.jsonl").write_text(text, encoding="utf-8")
    accepted, rejected = (sum(len(row.get(name, ())) for row, _ in rows) for name in ("expected", "rejected"))
    what = f"{how}; {accepted:,} accepted answers, {rejected:,} rejected" if how else _DRAFT
    lines.append(f"{folder / 'reward.py'}: {what}")
    template = files(__package__).joinpath(f"reward_{'by_answers' if how else 'draft'}.template").read_text("utf-8")
    prompt = max(prompts, key=lambda text: prompts[text], default="")
    text = template.replace("{how}", how).replace("{prompt}", _quoted(prompt))
    (folder / "reward.py").write_text(text, encoding="utf-8")
    splits = {question_key(row): row["split"] for row, _ in rows}
    return WrittenTasks(lines, not how, how, lambda rollout: accepts(*judged(rollout)), splits)


def judged(rollout: Rollout) -> tuple[Mapping[str, float], bool]:
    """The scores of a trace, and whether nothing that happened speaks against its answer."""
    facts, outcome = rollout.metadata, rollout.outcome
    bad = outcome.failure or facts.get("first_corrected") or not all(step["ok"] for step in outcome.steps)
    return outcome.reward_components, not bad


def _collect(rollouts: Iterable[Rollout]) -> tuple[dict[str, _Task], Counter[str], Counter[str]]:
    tasks, left_out, prompts = dict[str, _Task](), Counter[str](), Counter[str]()
    corrected = set[str]()
    for number, rollout in enumerate(rollouts):
        facts, outcome, first = rollout.metadata, rollout.outcome, rollout.calls[0].messages
        key = question_key(rollout.task)
        if facts["continues"]:
            left_out["traces that go on with a conversation"] += 1
            corrected |= {key} if facts["corrects"] else set()
            continue
        if not key:
            left_out["traces without a user's turn"] += 1
            continue
        prompts.update([plain(first[0].get("content"))] if first and first[0]["role"] == "system" else [])
        inputs = {
            name: value
            for name, value in rollout.task["inputs"].items()
            if isinstance(value, str | int | float | bool) and value != rollout.task["question"]
        }
        place = json.dumps([key, inputs], sort_keys=True)
        task = tasks.setdefault(place, _Task(rollout.task["question"], inputs, rollout.started, number))
        if outcome.answer and len(task.answers) < _ANSWERS:
            task.answers.append((facts.get("first_answer") or outcome.answer, *judged(rollout)))
    for task in tasks.values():
        if question_key({"question": task.question}) in corrected:
            task.answers = [(answer, scores, False) for answer, scores, _ in task.answers]
    constant = _constant([task.inputs for task in tasks.values()])
    for task in tasks.values():
        task.inputs = {name: value for name, value in task.inputs.items() if name not in constant}
    return tasks, left_out, prompts


def _constant(inputs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names whose values are all the same, or that would hide a column of the task."""
    names = {name for values in inputs for name in values}
    same = {name for name in names if len({repr(values.get(name)) for values in inputs}) == 1}
    return same | (names & {"id", "question", "group", "split", "expected", "rejected", "recorded_answer"})


def _judged_by(tasks: Mapping[str, _Task]) -> tuple[str, Callable[[Mapping[str, float], bool], bool | None]]:
    """How answers are told apart, in words, and a function that says of one whether it is accepted (or None)."""
    answers = [answer for task in tasks.values() for answer in task.answers]
    for name, _ in Counter(name for _, scores, _ in answers for name in scores).most_common():
        values = [scores[name] for _, scores, _ in answers if name in scores]
        if (least := min(values)) < (most := max(values)):
            limit = (least + most) / 2
            how = f"by the score {name!r}, {least:g} to {most:g}: accepted from {limit:g} on"
            return how, partial(_by_score, name, limit)
    if len({good for *_, good in answers}) > 1:
        return _BY_OUTCOME, lambda _, good: good
    return "", lambda *_: None


def _by_score(name: str, limit: float, scores: Mapping[str, float], _: bool) -> bool | None:
    return scores[name] >= limit if name in scores else None


def _divide(rows: Sequence[tuple[dict[str, Any], float]]) -> str:
    """Give each row its id, group and split; returns them in words. Rows are in the order of their times."""
    bands = [dict(zip(map(str, range(_BANDS)), _bands(question_key(row)), strict=True)) for row, _ in rows]
    named = [{"question": row["question"], **band} for (row, _), band in zip(rows, bands, strict=True)]
    groups = sorted(together(named, [str(place) for place in range(_BANDS)]), key=min)
    wanted, validation = max(1, round(len(rows) * _HELD_OUT)), 0
    for number, group in reversed(list(enumerate(groups))):
        later = validation < wanted and (validation + len(group) <= 2 * wanted) and number > 0
        validation += len(group) if later else 0
        for place in group:
            rows[place][0].update(id=f"task-{place}", group=f"group-{number}", split="validation" if later else "train")
    when = "of later traces" if rows[0][1] < rows[-1][1] else "at the end of the files, as traces have no times"
    if (undated := sum(not started for _, started in rows)) < len(rows) and undated:
        when += f" ({undated:,} without a time count as the earliest)"
    return (
        f"{counted(len(rows), 'task')} in {counted(len(groups), 'group')} of near duplicates; "
        f"{len(rows) - validation:,} to train, {validation:,} {when} to validate"
    )


def _bands(text: str) -> Iterator[str]:
    """MinHashes of the pieces of a text (Broder 1997), some of them together as one value."""
    import numpy as np

    pieces = {text[place : place + _SHINGLE] for place in range(max(1, len(text) - _SHINGLE + 1))}
    digests = (hashlib.blake2b(piece.encode("utf-8", "replace"), digest_size=8).digest() for piece in pieces)
    hashes = np.frombuffer(b"".join(digests), dtype="<u8")
    factors = np.random.default_rng(0).integers(0, 1 << 62, size=(_BANDS * _ROWS, 1), dtype=np.uint64) * 2 + 1
    least = (hashes[None, :] * factors).min(axis=1).reshape(_BANDS, _ROWS)
    yield from (row.tobytes().hex() for row in least)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
