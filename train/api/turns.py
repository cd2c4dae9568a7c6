"""At which calls the failed rollouts of a run lost their chance, for ``groundwire why --turns``."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from groundwire.tools.errors import CommandError
from groundwire.train.api.branches import Branch, Brancher, in_words
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir, RunDirError
from groundwire.train.evaluation.diagnosis import trained_calls
from groundwire.train.evaluation.metrics import RIGHT
from groundwire.train.evaluation.turn_values import FIRST_SAMPLES, Turn, Value, losses, next_values, tool_names
from groundwire.train.job.job import Job
from groundwire.train.report.turns import FILE
from groundwire.train.store.rollout import Rollout

_ROUNDS, _LEAST = 8, 16  # of the samples that depend on earlier ones: the number of rounds, and the size of a small one


def lost_chances(job: Job, run: RunDir, *, budget: int, on_end: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Sample the values before the trained calls of the newest failed rollouts, and write what was lost to
    :data:`groundwire.train.report.turns.FILE`.

    At most ``budget`` continuations are sampled. Raises :class:`CommandError` if these are too few for one rollout, and
    :class:`RunDirError` if no rollout can be looked at.
    """
    failed, total, left_out = _newest_failed(run, max(1, budget // (2 * FIRST_SAMPLES)))
    with Brancher(job, run) as brancher:
        rollouts = _affordable(_turns_of(run, brancher, failed, left_out), budget)
        if not rollouts:
            raise RunDirError(f"no failed rollout of {run.path} can be looked at: {in_words(left_out)}")
        rollouts = _sample(brancher, rollouts, budget, left_out, on_end)
    if not rollouts:
        raise RunDirError(f"no continuation has a reward: {in_words(left_out)}")
    turns = [turn for of_rollout in rollouts for turn in of_rollout]
    result: dict[str, Any] = {
        **{"failed": total, "rollouts": len(rollouts), "left_out": dict(left_out)},
        **{"samples": brancher.samples, "budget": budget, "model": brancher.model, "seed": job.config.seed},
        "temperature": brancher.temperature(turns[0].rollout),
        "chance": sum(of_rollout[0].value.share for of_rollout in rollouts) / len(rollouts),
        "agents": [loss._asdict() for loss in losses(turns, lambda turn: turn.call.agent or "the agent")],
        "tools": [loss._asdict() for loss in losses(turns, lambda turn: turn.tools or "no tool")],
        "turns": [_row(turn) for turn in sorted(turns, key=lambda turn: -turn.drop)],
    }
    run.write_json(FILE, result)
    return result


def _newest_failed(run: RunDir, most: int) -> tuple[list[Rollout], int, Counter[str]]:
    """The newest rollouts that the policy failed, how many the run has, and what was left out of them."""
    damaged, match = list[str](), run.config().get("agent_match")
    newest, left_out, total = deque[Rollout](maxlen=most), Counter[str](), 0
    for batch in run.rollout_batches(None, damaged):
        for rollout in batch:
            if rollout.outcome.reward is None:
                left_out["failed for another reason than the policy"] += 1
            elif rollout.outcome.reward <= RIGHT:
                total += 1
                if trained_calls(rollout, match):
                    newest.append(rollout)
                else:
                    left_out["has no call that was or could be trained"] += 1
    if damaged:
        raise RunDamagedError(damaged[0])
    if not newest:
        raise RunDirError(
            f"no rollout of {run.path} failed at a call that was trained"
            + (f": {in_words(left_out)}" if left_out else "")
        )
    return [*reversed(newest)], total, left_out


def _turns_of(run: RunDir, brancher: Brancher, failed: Sequence[Rollout], left_out: Counter[str]) -> list[list[Turn]]:
    """The turns of the rollouts that go as recorded. Those of a task that agree up to a call share its value."""
    values, rollouts = defaultdict[Any, Value](Value), list[list[Turn]]()
    for replayed in brancher.run([Branch(rollout, None) for rollout in failed]):
        if replayed.difference is not None:
            left_out[f"not as recorded: {replayed.difference.sentence}"] += 1
            continue
        rollout, before = replayed.branch.rollout, list[Any]()
        trained = {id(call) for call in trained_calls(rollout, run.config().get("agent_match")) if not call.choice}
        turns = list[Turn]()
        for number, call in enumerate(rollout.calls, 1):
            if id(call) in trained:
                value = values[str(rollout.task["id"]), rollout.sampling.get("temperature"), tuple(before)]
                if turns:
                    turns[-1].after = value
                tools = tool_names(replayed.replies.get(call.reply_key, {}))
                turns.append(Turn(rollout, call, number, tools, value))
            before.append((call.agent, call.prompt_key, tuple(call.response_ids)))
        rollouts.append(turns)
    return rollouts


def _affordable(rollouts: Sequence[list[Turn]], budget: int) -> list[list[Turn]]:
    """The first ones whose values take at most half of the budget for their first samples; one may take all."""
    chosen = list[list[Turn]]()
    for turns in rollouts:
        values = {id(turn.value) for of_rollout in (*chosen, turns) for turn in of_rollout}
        if chosen and 2 * FIRST_SAMPLES * len(values) > budget:
            break
        if (needed := FIRST_SAMPLES * len(values)) > budget:
            raise CommandError(f"--budget {budget} is too small: one failed rollout takes at least {needed} samples")
        chosen.append(turns)
    return chosen


def _sample(
    brancher: Brancher,
    rollouts: list[list[Turn]],
    budget: int,
    left_out: Counter[str],
    on_end: Callable[[], None],
) -> list[list[Turn]]:
    """Add samples to the values; returns the rollouts whose values all have one."""
    drawn, left = Counter[int](), budget
    first = FIRST_SAMPLES * len({id(turn.value) for turns in rollouts for turn in turns})
    while chosen := next_values([turn for turns in rollouts for turn in turns], min(left, first)):
        branches = list[Branch]()
        for turn in chosen:
            branches.append(Branch(turn.rollout, turn.call, drawn[id(turn.value)]))
            drawn[id(turn.value)] += 1
        for turn, sampled in zip(chosen, brancher.run(branches, on_end=on_end), strict=True):
            if sampled.is_success is not None:
                turn.value.add(sampled.is_success)
            else:
                left_out[f"samples: {sampled.problem}"] += 1
        left, first = left - len(chosen), max(_LEAST, budget // _ROUNDS)
        hopeless = {key for key, count in drawn.items() if count >= 2 * FIRST_SAMPLES}
        rollouts = [
            turns for turns in rollouts if all(turn.value.samples or id(turn.value) not in hopeless for turn in turns)
        ]
    return [turns for turns in rollouts if all(turn.value.samples for turn in turns)]


def _row(turn: Turn) -> dict[str, Any]:
    values = {"before": turn.value, "after": turn.after}
    return {
        **{"rollout": turn.rollout.rollout_id, "task": str(turn.rollout.task["id"]), "call": turn.number},
        **{"agent": turn.call.agent, "tools": turn.tools, "name": turn.name, "drop": turn.drop},
        **{key: None if value is None else value.as_row() for key, value in values.items()},
    }
