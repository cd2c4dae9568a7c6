"""``python -m rewards.replay``: what another reward would have said of the rollouts that a run has stored.

A rollout's row holds the task, the answer and the trace, which is all that a reward is given; so a reward can be tried
on what a policy really wrote, without sampling anything again. What matters to the trainer is not the score but where
the scores of a group differ: only there is a gradient, and the replay says which groups gain or lose theirs.

A rollout that failed has no answer to judge and stays a failure. :func:`replay` takes rows and a reward and knows no
run folder; only the command below does, and imports that room when it is run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.rewards._scoring import Score, each_at_once, score
from groundwire.rewards._types import Reward
from groundwire.tools.plugins import PluginError, UnknownNameError
from groundwire.tools.terminal import Version, progress
from groundwire.train.cli.judge_options import JsonFile, JudgeBaseUrl, JudgeModel, JudgePairs, chosen, fail, write_json

__all__ = ["COLUMNS", "Group", "Replay", "Rescored", "app", "replay"]

COLUMNS = ("step", "mode", "group", "task_id", "rollout_id", "status", "reward", "task", "answer", "agent_steps")
"""What is read of a row of ``rollouts.parquet``."""

RIGHT = 0.5
"""A rollout counts as right above this reward: partial credit for a wrong answer ends here."""
_EXAMPLES = 3
_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """A rollout under both rewards; ``new`` is None where the new one could not be computed, and ``error`` says why."""

    step: int
    mode: str
    group: str
    task: str
    rollout: str
    question: str
    answer: str
    old: float
    new: float | None
    error: str = ""

    @property
    def flips(self) -> bool:
        """Whether it is right under one reward and wrong under the other."""
        return self.new is not None and (self.old > RIGHT) != (self.new > RIGHT)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The training rollouts of one task and step, in the run's order; a failure has no reward."""

    step: int
    group: str
    old: list[float]
    new: list[float]

    @property
    def had_gradient(self) -> bool:
        """Whether the old rewards differ."""
        return _differ(self.old)

    @property
    def has_gradient(self) -> bool:
        """Whether the new ones do."""
        return _differ(self.new)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """``failed`` counts the rollouts that had no reward and have none now."""

    rollouts: list[Rescored]
    groups: list[Group]
    failed: int


async def replay(
    rows: Iterable[Mapping[str, Any]], reward: Reward, *, on_end: Callable[[], None] = lambda: None
) -> Replay:
    """Score ``rows``, which have :data:`COLUMNS`, with ``reward``; ``on_end`` hears of each that is judged.

    Raises ``ValueError`` for a row that is none.
    """
    rows = list(rows)
    kept = [_parsed(row) for row in rows if row.get("reward") is not None]

    async def one(item: tuple[Mapping[str, Any], dict[str, Any], list[Any]]) -> Score:
        row, task, steps = item
        return await score(reward, task, row["answer"], steps)

    scores = await each_at_once(one, kept, on_end=on_end)
    rollouts = [_rescored(row, task, said) for (row, task, _), said in zip(kept, scores, strict=True)]
    groups: dict[tuple[int, str], list[Rescored]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.mode == "train":
            groups[rollout.step, rollout.group].append(rollout)
    return Replay(
        rollouts=rollouts,
        groups=[
            Group(
                step=step,
                group=name,
                old=[rollout.old for rollout in members],
                new=[rollout.new for rollout in members if rollout.new is not None],
            )
            for (step, name), members in sorted(groups.items())
        ],
        failed=len(rows) - len(kept),
    )


def _parsed(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any], list[Any]]:
    try:
        return row, json.loads(row["task"]), json.loads(row["agent_steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"rollout {row.get('rollout_id')!r} has no task and trace to judge: {error}") from error


def _rescored(row: Mapping[str, Any], task: Mapping[str, Any], said: Score) -> Rescored:
    return Rescored(
        step=row["step"],
        mode=row["mode"],
        group=row["group"],
        task=row["task_id"],
        rollout=row["rollout_id"],
        question=str(task.get("question", "")),
        answer=row["answer"],
        old=row["reward"],
        new=said.value,
        error=said.error,
    )


def _differ(rewards: Sequence[float]) -> bool:
    """Whether a group has a gradient. A rollout that is alone is compared with 0, as the trainers do it."""
    compared = rewards if len(rewards) > 1 else [0.0, *rewards]
    return max(compared) - min(compared) > _SLACK


# -- the command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/latest", metavar="RUN_DIR")],
    reward: Annotated[str, typer.Option(help="The reward to try: a name, or a sum like 0.9*a+0.1*b")],
    judge_model: JudgeModel = None,
    judge_base_url: JudgeBaseUrl = None,
    judge: JudgePairs = None,
    json_file: JsonFile = None,
    version: Version = False,
) -> None:
    """Score a run's stored rollouts with another reward: which groups gain or lose their gradient, which verdicts flip.

    The run may still be going on, or have been killed.
    """
    from groundwire.train.artifacts.run_dir import RunDir, RunDirError

    started = time.monotonic()
    try:
        ask, told = chosen(reward, judge_model=judge_model, judge_base_url=judge_base_url, judge=judge)
        rows, damaged = RunDir.open(run_dir).rollouts(COLUMNS)
        with progress("Judging", sum(row.get("reward") is not None for row in rows)) as on_end:
            found = asyncio.run(replay(rows, ask, on_end=on_end))
    except RunDirError as error:
        fail(error, status=error.exit_code)
    except (UnknownNameError, PluginError, ValueError) as error:
        fail(error)
    if json_file is not None:
        write_json(json_file, _report(found, reward, damaged))
    for sentence in damaged:
        typer.echo(f"left out: {sentence}", err=True)
    for sentence in told:
        typer.echo(f"note: {sentence}")
    typer.echo("\n".join(_table(found, reward)))
    typer.echo(f"{len(rows):,} rollouts in {time.monotonic() - started:.1f} s")


def _report(found: Replay, reward: str, damaged: list[str]) -> dict[str, Any]:
    return {
        "reward": reward,
        "damaged": damaged,
        **_counts(found),
        "groups": [
            {**asdict(group), "had_gradient": group.had_gradient, "has_gradient": group.has_gradient}
            for group in found.groups
        ],
        "rollouts": [{**asdict(rollout), "flips": rollout.flips} for rollout in found.rollouts],
    }


def _counts(found: Replay) -> dict[str, Any]:
    judged = [rollout for rollout in found.rollouts if rollout.new is not None]
    return {
        "judged": len(judged),
        "failed_then": found.failed,
        "failed_now": len(found.rollouts) - len(judged),
        "mean_old": _mean([rollout.old for rollout in judged]),
        "mean_new": _mean([rollout.new for rollout in judged if rollout.new is not None]),
        "to_right": sum(rollout.flips and rollout.old <= RIGHT for rollout in judged),
        "to_wrong": sum(rollout.flips and rollout.old > RIGHT for rollout in judged),
        "groups_gain": sum(group.has_gradient and not group.had_gradient for group in found.groups),
        "groups_lose": sum(group.had_gradient and not group.has_gradient for group in found.groups),
        "groups_keep": sum(group.had_gradient and group.has_gradient for group in found.groups),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _table(found: Replay, name: str) -> list[str]:
    counts, total = _counts(found), len(found.groups)
    before, after = counts["groups_keep"] + counts["groups_lose"], counts["groups_keep"] + counts["groups_gain"]
    mean = f": mean {counts['mean_old']:.3f} then, {counts['mean_new']:.3f} now" if counts["judged"] else ""
    lines = [
        f"reward {name} on {counts['judged']:,} rollouts{mean}",
        f"    {counts['failed_then']:,} had failed and stay failures, {counts['failed_now']:,} cannot be judged now",
    ]
    lines.append(f"groups with a gradient: {before:,} of {total:,} then, {after:,} now")
    for kind, gained in (("gain", True), ("lose", False)):
        changed = [g for g in found.groups if g.has_gradient == gained and g.had_gradient != gained]
        lines.append(f"    {len(changed):,} {kind} one")
        lines += [f"        step {g.step}, {g.group}: {_short(g.old)} -> {_short(g.new)}" for g in changed[:_EXAMPLES]]
    lines.append(f"verdicts that flip (right is above {RIGHT}): {counts['to_right'] + counts['to_wrong']:,}")
    for label, was_right in (("wrong to right", False), ("right to wrong", True)):
        flips = [rollout for rollout in found.rollouts if rollout.flips and (rollout.old > RIGHT) == was_right]
        lines.append(f"    {len(flips):,} {label}")
        for rollout in flips[:_EXAMPLES]:
            lines.append(f"        step {rollout.step}, {rollout.task}: {rollout.old:g} -> {rollout.new:g}")
            lines += [f"            {_line(text)}" for text in (rollout.question, rollout.answer)]
    errors = [rollout for rollout in found.rollouts if rollout.new is None]
    lines += [
        f"    cannot be judged: step {each.step}, {each.task}: {_line(each.error)}" for each in errors[:_EXAMPLES]
    ]
    return lines


def _short(rewards: Sequence[float]) -> str:
    return "[" + " ".join(f"{reward:.2g}" for reward in rewards) + "]"


def _line(text: str) -> str:
    return " ".join(text.split())[:140]


if __name__ == "__main__":
    app()
