"""``python -m train.why``: why a rollout, or a whole run of them, taught the policy nothing.

The rules are in :mod:`train.diagnosis` and :mod:`train.drift`; here they are put to a run's files, and told.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from train.diagnosis import KINDS, diagnose
from train.drift import CAUSES, Drift, drifts
from train.rundir import RunDir, RunDirError
from train.vocabulary import Vocabulary, vocabulary_of

__all__ = ["app", "explain", "overview"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_COLUMNS = (
    *("step", "mode", "temperature", "rollout_id", "task_id", "group", "status", "message", "reward", "attempts"),
    *("calls", "untrainable"),
)


class UnknownRolloutError(Exception):
    """No rollout of the run has the id, or several begin with it."""


@app.command()
def main(
    run_dir: Annotated[str, typer.Argument(help="The run's folder, e.g. runs/latest")],
    rollout_id: Annotated[
        str | None, typer.Argument(help="One rollout: its id, or how it begins. Without it: all of them, counted")
    ] = None,
) -> None:
    """Say why a rollout gave no triplets or no gradient; without a rollout, how many of each there are."""
    try:
        run = RunDir.open(run_dir)
        rows, damaged = run.rollouts(_COLUMNS)
        config, words = run.config(), vocabulary_of(run)
        for sentence in damaged:
            typer.echo(f"warning: {sentence}", err=True)
        lines = overview(rows, config, words) if rollout_id is None else explain(rows, rollout_id, config, words)
        for line in lines:
            typer.echo(line)
    except (RunDirError, UnknownRolloutError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


def overview(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any], words: Vocabulary) -> Iterator[str]:
    """How many rollouts of each kind, each with an example; then the drifts."""
    training = [row for row in rows if row["mode"] == "train"]
    yield f"{len(rows)} rollouts, {len(training)} of them for training"
    reasons = diagnose(rows, agent_match=config.get("agent_match"), trainer=str(config.get("trainer", "local")))
    examples: dict[str, tuple[str, str]] = {}
    for row, reason in zip(rows, reasons, strict=True):
        examples.setdefault(reason.kind, (row["rollout_id"], reason.text))
    counted = Counter(reason.kind for reason in reasons)
    for kind, count in counted.most_common():
        yield f"{count:7}  {count / len(rows):4.0%}  {KINDS[kind]}"
        yield f"                {examples[kind][0]}: {examples[kind][1]}"
    yield from _drifts_of_all(rows, config, words)


def explain(
    rows: Sequence[Mapping[str, Any]], rollout_id: str, config: Mapping[str, Any], words: Vocabulary
) -> Iterator[str]:
    """One rollout: its reason, then its drifts. Raises :class:`UnknownRolloutError`."""
    row = _find(rows, rollout_id)
    group = [each for each in rows if (each["step"], each["mode"]) == (row["step"], row["mode"])]
    reasons = diagnose(group, agent_match=config.get("agent_match"), trainer=str(config.get("trainer", "local")))
    yield f"{row['rollout_id']} (step {row['step']}, task {row['task_id']}): {reasons[group.index(row)].text}"
    for drift in drifts(row["calls"] or (), words):
        yield drift.sentence(str(config.get("backend")), words)


def _drifts_of_all(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any], words: Vocabulary) -> Iterator[str]:
    later = sum(max(0, len(row["calls"] or ()) - 1) for row in rows)
    found: dict[str, list[tuple[str, Drift]]] = {}
    for row in rows:
        for drift in drifts(row["calls"] or (), words):
            found.setdefault(drift.cause, []).append((row["rollout_id"], drift))
    total = sum(map(len, found.values()))
    if not total:
        yield (
            f"each of the {later} later prompts begins with what was sampled before"
            if later
            else "no later prompts to compare"
        )
        return
    yield f"{total} of {later} later prompts do not begin with what was sampled ({config.get('backend')}):"
    for cause, each in sorted(found.items(), key=lambda item: -len(item[1])):
        rollout, drift = each[0]
        yield f"{len(each):7}  {len(each) / later:4.0%}  {CAUSES[cause]}"
        yield f"                {rollout}: {drift.difference(words)}"


def _find(rows: Sequence[Mapping[str, Any]], rollout_id: str) -> Mapping[str, Any]:
    found = [row for row in rows if row["rollout_id"].startswith(rollout_id)]
    exact = [row for row in found if row["rollout_id"] == rollout_id]
    if exact or len(found) == 1:
        return (exact or found)[0]
    if found:
        raise UnknownRolloutError(f"{len(found)} rollouts begin with {rollout_id!r}; give more of its id")
    raise UnknownRolloutError(
        f"no rollout of this run is {rollout_id!r}; its {len(rows)} rollouts are like {rows[0]['rollout_id']!r}"
    )


if __name__ == "__main__":
    app()
