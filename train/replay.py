"""``python -m train.replay``: score a run's stored rollouts with another reward (:mod:`groundwire.rewards.rescore`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.rewards.rescore import COLUMNS, RIGHT, RescoredRun, rescore
from groundwire.tools.env_file import read_env_file
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.terminal import Version, progress
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.judge_options import JsonFile, JudgeBaseUrl, JudgeModel, JudgePairs, get_reward, write_json

__all__ = ["app"]

_EXAMPLES = 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run_dir: Annotated[Path, typer.Argument(help="Run directory, e.g. runs/latest", metavar="RUN_DIR")],
    reward: Annotated[str, typer.Option(help="The reward to try: a name, or a sum like 0.9*a+0.1*b")],
    judge_model: JudgeModel = None,
    judge_base_url: JudgeBaseUrl = None,
    judge: JudgePairs = None,
    json_file: JsonFile = None,
    version: Version = False,
) -> None:
    """Score a run's stored rollouts with another reward: which groups gain or lose their gradient, which answers flip.

    The run may still be in progress, or have been killed.
    """
    started = time.monotonic()
    with exit_on_user_error():
        read_env_file()
        function, notes = get_reward(reward, judge_model=judge_model, judge_base_url=judge_base_url, judge=judge)
        rows, damaged = RunDir.open(run_dir).rollouts(COLUMNS)
        with progress("Judging", sum(row.get("reward") is not None for row in rows)) as on_end:
            try:
                result = asyncio.run(rescore(rows, function, on_end=on_end))
            except ValueError as error:
                raise CommandError(str(error)) from error
        counts = _counts(result)
        if json_file is not None:
            write_json(json_file, _report(result, counts, reward, damaged))
    for message in damaged:
        typer.echo(f"left out: {message}", err=True)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo("\n".join(_table(result, counts, reward)))
    typer.echo(f"{len(rows):,} rollouts in {time.monotonic() - started:.1f} s")


def _report(result: RescoredRun, counts: dict[str, Any], reward: str, damaged: list[str]) -> dict[str, Any]:
    return {
        "reward": reward,
        "damaged": damaged,
        **counts,
        "groups": [
            {**asdict(group), "had_gradient": group.had_gradient, "has_gradient": group.has_gradient}
            for group in result.groups
        ],
        "rollouts": [{**asdict(rollout), "flips": rollout.flips} for rollout in result.rollouts],
    }


def _counts(result: RescoredRun) -> dict[str, Any]:
    judged = [rollout for rollout in result.rollouts if rollout.new is not None]
    return {
        "judged": len(judged),
        "failed_then": result.failed,
        "failed_now": len(result.rollouts) - len(judged),
        "mean_old": _mean([rollout.old for rollout in judged]),
        "mean_new": _mean([rollout.new for rollout in judged if rollout.new is not None]),
        "to_right": sum(rollout.flips and rollout.old <= RIGHT for rollout in judged),
        "to_wrong": sum(rollout.flips and rollout.old > RIGHT for rollout in judged),
        "groups_gain": sum(group.has_gradient and not group.had_gradient for group in result.groups),
        "groups_lose": sum(group.had_gradient and not group.has_gradient for group in result.groups),
        "groups_keep": sum(group.had_gradient and group.has_gradient for group in result.groups),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _table(result: RescoredRun, counts: dict[str, Any], reward: str) -> list[str]:
    before, after = counts["groups_keep"] + counts["groups_lose"], counts["groups_keep"] + counts["groups_gain"]
    means = f": mean {counts['mean_old']:.3f} in the run, {counts['mean_new']:.3f} now" if counts["judged"] else ""
    lines = [
        f"reward {reward} on {counts['judged']:,} rollouts{means}",
        f"    {counts['failed_then']:,} failed in the run and are left out, "
        f"{counts['failed_now']:,} cannot be scored now",
        f"groups with a gradient: {before:,} of {len(result.groups):,} in the run, {after:,} now",
    ]
    for verb, gained in (("gain", True), ("lose", False)):
        changed = [each for each in result.groups if each.has_gradient == gained and each.had_gradient != gained]
        lines.append(f"    {len(changed):,} {verb} one")
        lines += [
            f"        step {each.step}, {each.group}: {_rewards(each.old)} -> {_rewards(each.new)}"
            for each in changed[:_EXAMPLES]
        ]
    lines.append(f"answers that flip (right is above {RIGHT}): {counts['to_right'] + counts['to_wrong']:,}")
    for label, was_right in (("wrong to right", False), ("right to wrong", True)):
        flips = [each for each in result.rollouts if each.flips and (each.old > RIGHT) == was_right]
        lines.append(f"    {len(flips):,} {label}")
        for each in flips[:_EXAMPLES]:
            lines.append(f"        step {each.step}, {each.task}: {each.old:g} -> {each.new:g}")
            lines += [f"            {_one_line(text)}" for text in (each.question, each.answer)]
    failed = [each for each in result.rollouts if each.new is None]
    for each in failed[:_EXAMPLES]:
        lines.append(f"    cannot be scored: step {each.step}, {each.task}: {_one_line(each.error)}")
    return lines


def _rewards(rewards: Sequence[float]) -> str:
    return "[" + " ".join(f"{reward:.2g}" for reward in rewards) + "]"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:140]


if __name__ == "__main__":
    app()
