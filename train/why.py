"""``groundwire why``: why a rollout, or the rollouts of a whole run, taught the policy nothing.

The rules are in :mod:`groundwire.train.evaluation.diagnosis` and :mod:`groundwire.train.report.prefix_mismatch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.terminal import Version, spinner
from groundwire.train.algorithms.health import warnings_by_step
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.config.failures import POLICY_FAILURES
from groundwire.train.evaluation.run_reader import settings_changes
from groundwire.train.report.prefix_mismatch import CAUSES, find_mismatches
from groundwire.train.report.token_text import TokenDecoder, token_decoder

__all__ = ["app", "overview"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Row = Mapping[str, Any]
Settings = Callable[[int], Mapping[str, Any]]

_COLUMNS = (
    *("step", "mode", "temperature", "rollout_id", "task_id", "group", "status", "message", "reward", "attempts"),
    *("calls", "untrainable", "credits"),
)


@app.command()
def main(
    run_dir: Annotated[str, typer.Argument(help="Run directory, e.g. runs/latest", metavar="RUN_DIR")],
    rollout_id: Annotated[
        str | None,
        typer.Argument(
            help="Id of a rollout, or its first characters. Default: count all rollouts", metavar="ROLLOUT_ID"
        ),
    ] = None,
    version: Version = False,
) -> None:
    """Explain why a rollout gave no triplets or no gradient.

    Without a rollout, count the reasons in the whole run, and repeat what the run has warned of.
    """
    with exit_on_user_error():
        run = RunDir.open(run_dir)
        damaged: list[str] = []
        batches = run.rollout_batches(_COLUMNS, damaged)
        decoder = token_decoder(run)
        with spinner("reading the run"):
            if rollout_id is None:
                lines = [*settings_changes(run), *overview(batches, run.config, decoder)]
                try:
                    lines += warnings_by_step(run.metrics())
                except RunDamagedError as error:
                    damaged.append(str(error))
            else:
                lines = list(_explain(batches, rollout_id, run.config, decoder))
    typer.echo("\n".join(lines))
    for message in damaged:
        typer.echo(f"warning: {message}", err=True)


def overview(batches: Iterable[Sequence[Row]], settings: Settings, decoder: TokenDecoder) -> Iterator[str]:
    """The number of rollouts of each kind, with an example each, then of prefix mismatches.

    Each batch is a whole step or validation; one is in memory at a time. ``settings`` returns those of a step.
    """
    from groundwire.train.evaluation.diagnosis import KINDS, diagnose, scored  # slow: imports numpy

    kinds, causes, failures = Counter[str](), Counter[str](), Counter[str]()
    examples: dict[str, str] = {}
    training = later_prompts = 0
    for rows in batches:
        training += sum(row["mode"] == "train" for row in rows)
        for row, reason in zip(rows, diagnose(rows, _of_step(rows, settings)), strict=True):
            kinds[reason.kind] += 1
            if row["status"] != "succeeded":
                failures[f"{row['status']} ({scored(row)})"] += 1
            examples.setdefault(reason.kind, f"{row['rollout_id']}: {reason.text}")
            calls = row["calls"] or ()
            later_prompts += max(0, len(calls) - 1)
            for mismatch in find_mismatches(calls, decoder):
                causes[mismatch.cause] += 1
                examples.setdefault(mismatch.cause, f"{row['rollout_id']}: {mismatch.difference(decoder)}")
    rollouts, mismatches = kinds.total(), causes.total()
    if not rollouts:
        yield "no rollout has been written yet"
        return
    yield f"{rollouts} rollouts, {training} of them for training"
    yield from _counts(kinds, rollouts, KINDS, examples)
    if failures:
        yield f"failed: {', '.join(f'{count} {kind} {count / rollouts:.0%}' for kind, count in failures.most_common())}"
        policy = sum(count for kind, count in failures.items() if kind.split()[0] in POLICY_FAILURES)
        rest = failures.total() - policy
        yield f"the policy caused {policy} ({policy / rollouts:.0%}), what it runs on {rest} ({rest / rollouts:.0%})"
    if mismatches:
        backend = settings(0).get("backend")
        text = "later prompts do not begin with an earlier prompt and its reply"
        yield f"{mismatches} of {later_prompts} {text} ({backend}):"
        yield from _counts(causes, later_prompts, CAUSES, examples)
    elif later_prompts:
        yield f"each of the {later_prompts} later prompts begins with an earlier prompt and its reply"
    else:
        yield "no later prompts"


def _explain(
    batches: Iterable[Sequence[Row]], rollout_id: str, settings: Settings, decoder: TokenDecoder
) -> Iterator[str]:
    """The reason of one rollout, the credit of its calls, then its prefix mismatches."""
    from groundwire.train.evaluation.credits import credit_lines
    from groundwire.train.evaluation.diagnosis import diagnose

    found: list[tuple[Row, str, list[str]]] = []
    for rows in batches:
        matches = [index for index, row in enumerate(rows) if row["rollout_id"].startswith(rollout_id)]
        if matches:
            reasons = diagnose(rows, _of_step(rows, settings))
            found += [(rows[index], reasons[index].text, list(credit_lines(rows[index]))) for index in matches]
    found = [each for each in found if each[0]["rollout_id"] == rollout_id] or found
    if len(found) != 1:
        problem = f"{len(found)} rollouts begin with" if found else "no rollout of this run is"
        raise CommandError(f"{problem} {rollout_id!r}; report.html and rollouts.parquet have the ids")
    [(row, text, lines)] = found
    yield f"{row['rollout_id']} (step {row['step']}, task {row['task_id']}): {text}"
    yield from lines
    for mismatch in find_mismatches(row["calls"] or (), decoder):
        yield mismatch.explanation(str(settings(0).get("backend")), decoder)


def _of_step(rows: Sequence[Row], settings: Settings) -> Mapping[str, Any]:
    """The settings with which a batch was run."""
    return settings(int(rows[0]["step"])) if rows else {}


def _counts(counts: Counter[str], total: int, names: Mapping[str, str], examples: Mapping[str, str]) -> Iterator[str]:
    for kind, count in counts.most_common():
        yield f"{count:7}  {count / total:4.0%}  {names[kind]}"
        yield f"                {examples[kind]}"


if __name__ == "__main__":
    app()
