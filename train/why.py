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
from groundwire.train.evaluation.diagnosis import KINDS, Reason, credit_lines, diagnose, scored
from groundwire.train.evaluation.run_reader import settings_changes
from groundwire.train.report.prefix_mismatch import CAUSES, find_mismatches
from groundwire.train.report.token_text import TokenDecoder, token_decoder
from groundwire.train.store.rollout import Rollout

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Settings = Callable[[int], Mapping[str, Any]]

_COLUMNS = (
    *("step", "mode", "temperature", "rollout_id", "task_id", "group", "status", "message", "reward", "attempts"),
    "calls",
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


def overview(batches: Iterable[Sequence[Rollout]], settings: Settings, decoder: TokenDecoder) -> Iterator[str]:
    """The number of rollouts of each kind, with an example each, then of prefix mismatches.

    Each batch is a whole step or validation; one is in memory at a time. ``settings`` returns those of a step.
    """
    kinds, causes, failures = Counter[str](), Counter[str](), Counter[str]()
    examples: dict[str, str] = {}
    training = later_prompts = 0
    for rollouts in batches:
        training += sum(rollout.mode == "train" for rollout in rollouts)
        for rollout, reason in zip(rollouts, diagnose(rollouts, _of_step(rollouts, settings)), strict=True):
            kinds[reason.kind] += 1
            if failure := rollout.outcome.failure:
                failures[f"{failure} ({scored(rollout)})"] += 1
            examples.setdefault(reason.kind, f"{rollout.rollout_id}: {reason.text}")
            calls = rollout.trainable_calls
            later_prompts += max(0, len(calls) - 1)
            for mismatch in find_mismatches(calls, decoder):
                causes[mismatch.cause] += 1
                examples.setdefault(mismatch.cause, f"{rollout.rollout_id}: {mismatch.difference(decoder)}")
    total, mismatches = kinds.total(), causes.total()
    if not total:
        yield "no rollout has been written yet"
        return
    yield f"{total} rollouts, {training} of them for training"
    yield from _counts(kinds, total, KINDS, examples)
    if failures:
        yield f"failed: {', '.join(f'{count} {kind} {count / total:.0%}' for kind, count in failures.most_common())}"
        policy = sum(count for kind, count in failures.items() if kind.split()[0] in POLICY_FAILURES)
        rest = failures.total() - policy
        yield f"the policy caused {policy} ({policy / total:.0%}), what it runs on {rest} ({rest / total:.0%})"
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
    batches: Iterable[Sequence[Rollout]], rollout_id: str, settings: Settings, decoder: TokenDecoder
) -> Iterator[str]:
    """The reason of one rollout, the credit of its calls, then its prefix mismatches."""
    matches: list[tuple[Rollout, Reason]] = []
    for rollouts in batches:
        if any(rollout.rollout_id.startswith(rollout_id) for rollout in rollouts):
            reasons = diagnose(rollouts, _of_step(rollouts, settings))
            explained = zip(rollouts, reasons, strict=True)
            matches += [(rollout, reason) for rollout, reason in explained if rollout.rollout_id.startswith(rollout_id)]
    matches = [match for match in matches if match[0].rollout_id == rollout_id] or matches
    if len(matches) != 1:
        problem = f"{len(matches)} rollouts begin with" if matches else "no rollout of this run is"
        raise CommandError(f"{problem} {rollout_id!r}; report.html and rollouts.parquet have the ids")
    [(rollout, reason)] = matches
    yield f"{rollout.rollout_id} (step {rollout.step}, task {rollout.task['id']}): {reason.text}"
    yield from credit_lines(rollout)
    for mismatch in find_mismatches(rollout.trainable_calls, decoder):
        yield mismatch.explanation(str(settings(0).get("backend")), decoder)


def _of_step(rollouts: Sequence[Rollout], settings: Settings) -> Mapping[str, Any]:
    """The settings with which a batch was run."""
    return settings(rollouts[0].step) if rollouts else {}


def _counts(counts: Counter[str], total: int, names: Mapping[str, str], examples: Mapping[str, str]) -> Iterator[str]:
    for kind, count in counts.most_common():
        yield f"{count:7}  {count / total:4.0%}  {names[kind]}"
        yield f"                {examples[kind]}"


if __name__ == "__main__":
    app()
