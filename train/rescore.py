"""``groundwire rescore``: score a run's stored rollouts with another reward, without sampling again.

The record of a rollout holds the task, the answer and the agent's steps, which is all that a reward needs. The trainer
learns only from groups whose rewards differ, so the result lists the groups that gain or lose their gradient.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Annotated, Any

import typer

from groundwire.rewards import Reward, Score, comparison_of, declared_range, in_training, map_concurrently, score
from groundwire.rewards.judge.compare import compared_later
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file
from groundwire.tools.terminal import Version, progress
from groundwire.tools.text import one_line
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.complete import RunDirectory
from groundwire.train.cli.options import JsonFile, JudgeBaseUrl, JudgeModel, JudgePairs, get_reward, write_json
from groundwire.train.evaluation.metrics import RIGHT
from groundwire.train.rollouts.outcome import GroupComparison, groups_of
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout

_COLUMNS = (*GroupComparison.COLUMNS, "group", "rollout_id", "task", "agent_steps")
_TOLERANCE = 1e-9
_EXAMPLES = 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class RescoredRollout:
    """A rollout under both rewards; ``new`` is None where the new reward raised ``error``."""

    step: int
    mode: str
    group: str
    task: str
    rollout: str
    question: str
    answer: str
    old: float
    new: float | None
    error: str
    flips: bool
    """Whether it is right under one reward and wrong under the other."""


@dataclass(frozen=True, kw_only=True)
class RescoredGroup:
    """The rewards of one task's training rollouts in one step, in the run's order, without failures."""

    step: int
    group: str
    old: list[float]
    new: list[float]
    had_gradient: bool
    """Whether the old rewards differ."""
    has_gradient: bool
    """Whether the new rewards differ."""


@dataclass(frozen=True, kw_only=True)
class RescoredRun:
    """``failed`` counts the rollouts that failed in the run without a reward; they stay left out."""

    rollouts: list[RescoredRollout]
    groups: list[RescoredGroup]
    failed: int


async def rescore(
    rollouts: Sequence[Rollout], reward: Reward, *, on_end: Callable[[], None] = lambda: None
) -> RescoredRun:
    """Score the rollouts of a run with ``reward``. ``on_end`` is called after each rollout.

    Rollouts of training are judged as in training. A failure that scored in the run has no answer: it scores the least
    of the new rewards, or 0 if none is lower.
    """
    kept = [rollout for rollout in rollouts if rollout.outcome.reward is not None]

    async def score_rollout(rollout: Rollout) -> Score:
        if rollout.outcome.failure:
            return Score(math.inf)
        with in_training(rollout.mode == "train"):
            return await score(reward, rollout.task, rollout.outcome.answer, rollout.outcome.steps)

    compared_later.set(True)
    scores = await map_concurrently(score_rollout, kept, on_end=on_end)
    if (compare := comparison_of(reward)) is not None:
        scores = await _compared(kept, scores, compare)
    least = min([0.0, declared_range(reward)[0], *(scored.value for scored in scores if scored.value is not None)])
    rescored = []
    groups: dict[tuple[int, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for rollout, scored in zip(kept, scores, strict=True):
        old, new = rollout.outcome.reward or 0.0, least if scored.value == math.inf else scored.value
        if rollout.mode == "train":
            rewards = groups[rollout.step, rollout.group]
            rewards[0].append(old)
            rewards[1].extend([] if new is None else [new])
        rescored.append(
            RescoredRollout(
                step=rollout.step,
                mode=str(rollout.mode),
                group=rollout.group,
                task=str(rollout.task["id"]),
                rollout=rollout.rollout_id,
                question=str(rollout.task.get("question", "")),
                answer=rollout.outcome.answer,
                old=old,
                new=new,
                error=scored.error,
                flips=new is not None and (old > RIGHT) != (new > RIGHT),
            )
        )
    rescored_groups = [
        RescoredGroup(step=step, group=name, old=old, new=new, had_gradient=_differ(old), has_gradient=_differ(new))
        for (step, name), (old, new) in sorted(groups.items())
    ]
    return RescoredRun(rollouts=rescored, groups=rescored_groups, failed=len(rollouts) - len(kept))


async def _compared(rollouts: Sequence[Rollout], scores: Sequence[Score], compare: Any) -> list[Score]:
    """The scores with what ``compare`` adds to those of the answers of a group."""
    again = [
        replace(rollout, outcome=replace(rollout.outcome, reward=scored.value, message=scored.error))
        for rollout, scored in zip(rollouts, scores, strict=True)
    ]
    groups = [[again[place] for place in places] for places in groups_of(again)]
    if all(len(group) == 1 for group in groups):
        raise CommandError("no task has two answers: there is nothing to compare")
    failures = {rollout.outcome.failure for rollout in again} - {""}
    complete = GroupComparison(compare, failures, rollouts, StepTimer())
    await map_concurrently(complete, groups)
    return [Score(rollout.outcome.reward, rollout.outcome.message) for rollout in again]


def _differ(rewards: Sequence[float]) -> bool:
    """Whether a group has a gradient. A single rollout is compared with 0, as in the trainers."""
    compared = rewards if len(rewards) > 1 else [0.0, *rewards]
    return max(compared) - min(compared) > _TOLERANCE


@app.command()
def main(
    run_dir: RunDirectory,
    reward: Annotated[str, typer.Option(help="The reward to try: a name, or a sum")],
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
        rollouts, damaged = RunDir.open(run_dir).rollouts(_COLUMNS)
        with progress("Judging", sum(rollout.outcome.reward is not None for rollout in rollouts)) as on_end:
            result = asyncio.run(rescore(rollouts, function, on_end=on_end))
        changes = _changes(result)
        rewards = zip(*((rollout.old, rollout.new) for rollout in changes["judged"]), strict=True)
        old, new = [round(fmean(values), 4) for values in rewards] or (None, None)
        if json_file is not None:
            counts = {name: len(changed) for name, changed in changes.items()}
            figures = {"reward": reward, "damaged": damaged, "mean_old": old, "mean_new": new, **counts}
            lists = asdict(result)
            write_json(json_file, {**figures, "failed_then": lists.pop("failed"), **lists})
    for message in damaged:
        say(f"left out: {message}", err=True)
    for note in notes:
        say(f"note: {note}")
    say("\n".join(_table(result, changes, old, new, reward)))
    say(f"{len(rollouts):,} rollouts in {time.monotonic() - started:.1f} s")


def _changes(result: RescoredRun) -> dict[str, list[Any]]:
    """The rollouts and groups by what the new reward changes."""
    groups, rollouts = result.groups, result.rollouts
    return {
        "judged": [rollout for rollout in rollouts if rollout.new is not None],
        "failed_now": [rollout for rollout in rollouts if rollout.new is None],
        "to_right": [rollout for rollout in rollouts if rollout.flips and rollout.old <= RIGHT],
        "to_wrong": [rollout for rollout in rollouts if rollout.flips and rollout.old > RIGHT],
        "groups_gain": [group for group in groups if group.has_gradient and not group.had_gradient],
        "groups_lose": [group for group in groups if group.had_gradient and not group.has_gradient],
        "groups_keep": [group for group in groups if group.had_gradient and group.has_gradient],
    }


def _table(
    result: RescoredRun, changes: dict[str, list[Any]], old: float | None, new: float | None, reward: str
) -> list[str]:
    counts = {name: len(changed) for name, changed in changes.items()}
    before, after = counts["groups_keep"] + counts["groups_lose"], counts["groups_keep"] + counts["groups_gain"]
    means = f": mean {old:.3f} in the run, {new:.3f} now" if changes["judged"] else ""
    lines = [
        f"reward {reward} on {counts['judged']:,} rollouts{means}",
        f"    {result.failed:,} failed in the run and are left out, {counts['failed_now']:,} cannot be scored now",
        f"groups with a gradient: {before:,} of {len(result.groups):,} in the run, {after:,} now",
    ]
    for verb in ("gain", "lose"):
        lines.append(f"    {counts[f'groups_{verb}']:,} {verb} one")
        lines += [
            f"        step {group.step}, {group.group}: {_rewards(group.old)} -> {_rewards(group.new)}"
            for group in changes[f"groups_{verb}"][:_EXAMPLES]
        ]
    lines.append(f"answers that flip (right is above {RIGHT}): {counts['to_right'] + counts['to_wrong']:,}")
    for label, name in (("wrong to right", "to_right"), ("right to wrong", "to_wrong")):
        lines.append(f"    {counts[name]:,} {label}")
        for rollout in changes[name][:_EXAMPLES]:
            lines.append(f"        step {rollout.step}, {rollout.task}: {rollout.old:g} -> {rollout.new:g}")
            lines += [f"            {one_line(text)}" for text in (rollout.question, rollout.answer)]
    lines += [
        f"    cannot be scored: step {rollout.step}, {rollout.task}: {one_line(rollout.error)}"
        for rollout in changes["failed_now"][:_EXAMPLES]
    ]
    return lines


def _rewards(rewards: Sequence[float]) -> str:
    return "[" + " ".join(f"{reward:.2g}" for reward in rewards) + "]"


if __name__ == "__main__":
    app()
