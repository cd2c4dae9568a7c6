"""``python -m train.why``: why a rollout, or a whole run of them, taught the policy nothing.

The rules are in :mod:`groundwire.train.evaluation.diagnosis` and :mod:`groundwire.train.report.prefix_mismatch`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from groundwire.tools.terminal import Version, spinner
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.evaluation.diagnosis import KINDS, Reason, diagnose
from groundwire.train.report.prefix_mismatch import CAUSES, find_mismatches
from groundwire.train.report.token_text import TokenDecoder, token_decoder

__all__ = ["app", "explain", "overview"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Row = Mapping[str, Any]

_COLUMNS = (
    *("step", "mode", "temperature", "rollout_id", "task_id", "group", "status", "message", "reward", "attempts"),
    *("calls", "untrainable"),
)


class UnknownRolloutError(RunDirError):
    """No rollout of the run has the id, or several begin with it."""


@app.command()
def main(
    run_dir: Annotated[str, typer.Argument(help="The run's folder, e.g. runs/latest")],
    rollout_id: Annotated[
        str | None, typer.Argument(help="One rollout: its id, or how it begins. Without it: all of them, counted")
    ] = None,
    version: Version = False,
) -> None:
    """Say why a rollout gave no triplets or no gradient; without a rollout, how many of each there are."""
    try:
        run = RunDir.open(run_dir)
        damaged: list[str] = []
        batches = run.rollout_batches(_COLUMNS, damaged)
        config, words = run.config(), token_decoder(run)
        with spinner("reading the run"):
            found = (
                overview(batches, config, words) if rollout_id is None else explain(batches, rollout_id, config, words)
            )
            lines = list(found)
        for line in lines:
            typer.echo(line)
        for sentence in damaged:
            typer.echo(f"warning: {sentence}", err=True)
    except RunDirError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def overview(batches: Iterable[Sequence[Row]], config: Mapping[str, Any], words: TokenDecoder) -> Iterator[str]:
    """How many rollouts of each kind, each with an example; then the prefix mismatches.

    ``batches`` are whole steps and validations, and only one of them is held at a time.
    """
    counted, causes = Counter[str](), Counter[str]()
    examples: dict[str, str] = {}
    training = later = 0
    for rows in batches:
        training += sum(row["mode"] == "train" for row in rows)
        for row, reason in zip(rows, _reasons(rows, config), strict=True):
            counted[reason.kind] += 1
            examples.setdefault(reason.kind, f"{row['rollout_id']}: {reason.text}")
            later += max(0, len(row["calls"] or ()) - 1)
            for mismatch in find_mismatches(row["calls"] or (), words):
                causes[mismatch.cause] += 1
                examples.setdefault(mismatch.cause, f"{row['rollout_id']}: {mismatch.difference(words)}")
    total, mismatched = counted.total(), causes.total()
    if not total:
        yield "no rollout has been written yet"
        return
    yield f"{total} rollouts, {training} of them for training"
    yield from _counted(counted, total, KINDS, examples)
    if not mismatched:
        yield f"each of the {later} later prompts begins with what was sampled before" if later else "no later prompts"
        return
    yield f"{mismatched} of {later} later prompts do not begin with what was sampled ({config.get('backend')}):"
    yield from _counted(causes, later, CAUSES, examples)


def explain(
    batches: Iterable[Sequence[Row]], rollout_id: str, config: Mapping[str, Any], words: TokenDecoder
) -> Iterator[str]:
    """One rollout: its reason, then its prefix mismatches. Raises :class:`UnknownRolloutError`."""
    found: list[tuple[Row, str]] = []
    for rows in batches:
        fitting = [place for place, row in enumerate(rows) if row["rollout_id"].startswith(rollout_id)]
        reasons = _reasons(rows, config) if fitting else []
        found += [(rows[place], reasons[place].text) for place in fitting]
    exact = [each for each in found if each[0]["rollout_id"] == rollout_id]
    if len(exact or found) != 1:
        what = f"{len(found)} rollouts begin with" if found else "no rollout of this run is"
        raise UnknownRolloutError(f"{what} {rollout_id!r}; report.html and rollouts.parquet have the ids")
    [(row, text)] = exact or found
    yield f"{row['rollout_id']} (step {row['step']}, task {row['task_id']}): {text}"
    for mismatch in find_mismatches(row["calls"] or (), words):
        yield mismatch.explanation(str(config.get("backend")), words)


def _reasons(rows: Sequence[Row], config: Mapping[str, Any]) -> list[Reason]:
    return diagnose(rows, agent_match=config.get("agent_match"), trainer=str(config.get("trainer", "local")))


def _counted(counted: Counter[str], total: int, names: Mapping[str, str], examples: Mapping[str, str]) -> Iterator[str]:
    for kind, count in counted.most_common():
        yield f"{count:7}  {count / total:4.0%}  {names[kind]}"
        yield f"                {examples[kind]}"


if __name__ == "__main__":
    app()
