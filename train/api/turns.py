"""At which calls the failed rollouts of a run lost their chance, for ``groundwire why --turns``."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from groundwire.tools.errors import CommandError
from groundwire.train.algorithms.statistics import wilson
from groundwire.train.api.branches import Branch, Brancher, in_words
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir, RunDirError
from groundwire.train.evaluation.diagnosis import trained_calls
from groundwire.train.evaluation.metrics import RIGHT
from groundwire.train.evaluation.turn_values import FIRST_SAMPLES, Turn, Value, losses, next_values, tool_calls
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
    left_out = Counter[str]()
    failed, total = _newest_failed(run, max(1, budget // (2 * FIRST_SAMPLES)), left_out)
    with Brancher(job, run) as brancher:
        rollouts = _affordable(_turns_of(run, brancher, failed, left_out), budget)
        rollouts = _sample(brancher, rollouts, budget, left_out, on_end)
    if not rollouts:
        raise RunDirError(f"no failed rollout of {run.path} can be looked at: {in_words(left_out)}")
    turns = [turn for of_rollout in rollouts for turn in of_rollout]
    result: dict[str, Any] = {
        **{"failed": total, "rollouts": len(rollouts), "left_out": dict(left_out)},
        **{"samples": brancher.samples, "model": brancher.model, "seed": job.config.seed},
        "temperature": brancher.temperature(turns[0].rollout),
        "chance": sum(of_rollout[0].value.share for of_rollout in rollouts) / len(rollouts),
        "agents": losses(turns, lambda turn: turn.call.agent or "the agent"),
        "tools": losses(turns, lambda turn: turn.tools or "no tool"),
        "turns": [_row(turn) for turn in sorted(turns, key=lambda turn: -turn.drop)],
    }
    run.write_json(FILE, result)
    return result


def _row(turn: Turn) -> dict[str, Any]:
    return {
        **{"rollout": turn.rollout.rollout_id, "call": turn.number, "agent": turn.call.agent or "the agent"},
        **{"tools": turn.tools, "share": turn.value.share, "samples": turn.value.samples, "drop": turn.drop},
        **{"interval": wilson(turn.value.successes, turn.value.samples), "text": str(turn)},
    }


def _newest_failed(run: RunDir, most: int, left_out: Counter[str]) -> tuple[list[Rollout], int]:
    """The newest rollouts that the policy failed, and how many the run has."""
    damaged, match = list[str](), run.config().get("agent_match")
    newest, total = deque[Rollout](maxlen=most), 0
    for rollout in (rollout for batch in run.rollout_batches(None, damaged) for rollout in batch):
        if rollout.outcome.reward is None:
            left_out[f"failed of {rollout.outcome.failure}, which is not the policy's doing"] += 1
        elif rollout.outcome.reward <= RIGHT:
            total += 1
            if trained_calls(rollout, match):
                newest.append(rollout)
            else:
                left_out["made no call that was or could be trained"] += 1
    if damaged:
        raise RunDamagedError(damaged[0])
    if not newest:
        reasons = f": {in_words(left_out)}" if left_out else ""
        raise RunDirError(f"no rollout of {run.path} failed after a call that was trained{reasons}")
    return [*reversed(newest)], total


def _turns_of(run: RunDir, brancher: Brancher, failed: Sequence[Rollout], left_out: Counter[str]) -> list[list[Turn]]:
    """The turns of the rollouts that go as recorded. Those of a task that agree up to a call share its value."""
    values, rollouts = defaultdict[Any, Value](Value), list[list[Turn]]()
    for replayed in brancher.run([Branch(rollout, None) for rollout in failed]):
        if replayed.difference is not None:
            left_out[f"not as recorded: {replayed.difference.sentence}"] += 1
            continue
        rollout, before, turns = replayed.branch.rollout, list[Any](), list[Turn]()
        trained = {id(call) for call in trained_calls(rollout, run.config().get("agent_match")) if not call.choice}
        for number, call in enumerate(rollout.calls, 1):
            if id(call) in trained:
                value = values[str(rollout.task["id"]), brancher.temperature(rollout), tuple(before)]
                tools = dict.fromkeys(name for name, _ in tool_calls(replayed.replies.get(call.reply_key, {})))
                if turns:
                    turns[-1].after = value
                turns.append(Turn(rollout, call, number, ", ".join(tools), value))
            before.append((call.agent, call.prompt_key, *call.response_ids))
        rollouts.append(turns)
    return rollouts


def _affordable(rollouts: Sequence[list[Turn]], budget: int) -> list[list[Turn]]:
    """The first ones whose values take at most half of the budget for their first samples; one may take all."""
    chosen = list[list[Turn]]()
    for turns in rollouts:
        needed = FIRST_SAMPLES * len({id(turn.value) for each in (*chosen, turns) for turn in each})
        if needed > budget and not chosen:
            raise CommandError(f"--budget {budget} is too small: a failed rollout takes at least {needed} samples")
        if 2 * needed > budget and chosen:
            break
        chosen.append(turns)
    return chosen


def _sample(
    brancher: Brancher, rollouts: list[list[Turn]], budget: int, left_out: Counter[str], on_end: Callable[[], None]
) -> list[list[Turn]]:
    """Add samples to the values; returns the rollouts whose values all have one."""
    drawn, left = Counter[int](), budget
    size = FIRST_SAMPLES * len({id(turn.value) for turns in rollouts for turn in turns})
    while chosen := next_values([turn for turns in rollouts for turn in turns], min(left, size)):
        branches = list[Branch]()
        for turn in chosen:
            branches.append(Branch(turn.rollout, turn.call, drawn[id(turn.value)]))
            drawn[id(turn.value)] += 1
        for turn, sampled in zip(chosen, brancher.run(branches, on_end=on_end), strict=True):
            if sampled.is_success is not None:
                turn.value.add(sampled.is_success)
            else:
                left_out[f"samples: {sampled.problem}"] += 1
        left, size = left - len(chosen), max(_LEAST, budget // _ROUNDS)
        rollouts = [turns for turns in rollouts if all(turn.value.samples for turn in turns)]
    return rollouts
