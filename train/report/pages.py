"""Pages in the form of a run's report: of an attack on a reward (``groundwire audit --attack``), and of exported traces
(``groundwire traces``). Both begin with what the command printed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groundwire.domains.held_out import question_key
from groundwire.train.report.build import render, shown_rollout, shown_task
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.traces.summary import text_digest

if TYPE_CHECKING:
    from groundwire.rewards.attack import AttackResult

_SHOWN = 200


def attack_page(
    result: AttackResult, tasks: Iterable[Mapping[str, Any]], lines: Sequence[str], fail_above: float
) -> str:
    """The best-paid wrong answers; ``tasks`` have those of the examples, ``lines`` were printed, the verdict last."""
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


class TracesPage:
    """The page of the traces that pass through :meth:`watch`; it keeps a few, as the page shows them."""

    def __init__(self) -> None:
        self._seen, self._kept = 0, list[tuple[bytes, int, dict[str, Any], dict[str, Any]]]()

    def watch(self, rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
        """The rollouts, of which those are kept whose ids have the greatest digests, so that no trace is favoured."""
        for self._seen, rollout in enumerate(rollouts, 1):
            rank, facts = text_digest(rollout.rollout_id), rollout.metadata
            if self._seen <= _SHOWN or rank > self._kept[0][0]:
                key = text_digest(question_key(rollout.task) or rollout.rollout_id).hex()
                why = "the user corrects an answer" if facts["corrects"] or facts.get("corrected") else ""
                shown = {**shown_rollout(rollout, why), "task": key}
                kept = rank, self._seen, {"id": key, **shown_task(rollout.task)}, shown
                (heapq.heappush if self._seen <= _SHOWN else heapq.heapreplace)(self._kept, kept)
            yield rollout

    def html(self, lines: Sequence[str]) -> str:
        """The page; ``lines`` are those of the screen."""
        ordered = sorted(self._kept, key=lambda kept: kept[1])
        tasks, shown = {task["id"]: task for *_, task, _ in ordered}, [rollout for *_, rollout in ordered]
        parts = {"title": "Traces of agents", "state": lines[0], "lines": lines[1:], "total": self._seen}
        rest = "groundwire export writes all of them."
        return render({"tasks": tasks, "rollouts": shown, "words": []}, charts=(), tiles=(), rest=rest, **parts)
