"""The report of an attack on a reward: the screen of ``groundwire audit --attack``, and the best-paid wrong answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from groundwire.rewards.attack import AttackResult
from groundwire.train.report.build import render, shown_rollout, shown_task
from groundwire.train.store.rollout import Outcome, Rollout


def attack_page(result: AttackResult, tasks: Iterable[Mapping[str, Any]], lines: list[str], fail_above: float) -> str:
    """The page; ``tasks`` have those of the examples, ``lines`` are those of the screen, the verdict last."""
    rows = {str(task["id"]): task for task in tasks}
    shown: list[dict[str, Any]] = []
    for strategy in result.strategies:
        for example in strategy.examples:
            outcome = Outcome(answer=example.answer, steps=example.steps, reward=example.score)
            rollout = Rollout(task=rows[example.task], mode=None, outcome=outcome)
            told = f"{strategy.name}: {strategy.variant}; a right answer scores {example.right_score:g}. {strategy.fix}"
            shown.append(shown_rollout(rollout, credit=[told]))
    named = {row["task"]: shown_task(rows[row["task"]]) for row in shown}
    tiles = [(f"{len(result.holes(fail_above)):,}", f"of {len(result.strategies)} wrong strategies earn too much")]
    tiles += [(f"{result.tasks:,}", "tasks"), (f"{result.calls:,}", "calls of the reward")]
    return render(
        {"tasks": named, "rollouts": shown, "words": [], "view": "Wrong answers that earn"},
        title=f"Attack on the reward {result.reward}",
        state=lines[-1],
        lines=lines[:-1],
        tiles=tiles,
        charts=[],
        total=len(shown),
        rest="groundwire audit --attack --json FILE writes all strategies.",
    )
