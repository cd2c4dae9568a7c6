"""The report of exported traces: the screen of ``groundwire traces``, a chart, and some of the traces."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import Any

from groundwire.domains.held_out import question_key
from groundwire.train.evaluation.diagnosis import Reason
from groundwire.train.report.build import Note, render, shown_rollout, shown_task
from groundwire.train.report.charts import Chart, Series
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.summary import Summary, text_digest

_SHOWN = 200
_NO_COMPLAINT = "no complaint"
_DAY_S = 86400


class TracesPage:
    """The page of the traces that pass through :meth:`watch`; it keeps a few of them."""

    def __init__(self) -> None:
        self._days = Counter[tuple[int, str]]()
        self._kept = list[tuple[bytes, int, dict[str, Any], dict[str, Any]]]()
        """Of each its id's digest, its number, and its task and itself as the page shows them."""

    def watch(self, rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
        """The rollouts, of which those are kept whose ids have the greatest digests, so that no trace is favoured."""
        for number, rollout in enumerate(rollouts):
            if rollout.started:
                self._days[int(rollout.started // _DAY_S), _complaint(rollout) or _NO_COMPLAINT] += 1
            rank = text_digest(rollout.rollout_id)
            if number < _SHOWN or rank > self._kept[0][0]:
                key = text_digest(question_key(rollout.task) or rollout.rollout_id).hex()
                shown = shown_rollout(rollout, Note((0, 0), rollout, Reason("", _complaint(rollout))))
                kept = (rank, number, {"id": key, **shown_task(rollout.task)}, {**shown, "task": key})
                (heapq.heappush if number < _SHOWN else heapq.heapreplace)(self._kept, kept)
            yield rollout

    def html(self, summary: Summary, lines: list[str]) -> str:
        """The page; ``lines`` are those of the screen."""
        kept = sorted(self._kept, key=lambda kept: kept[1])
        data = {
            "tasks": {task["id"]: task for *_, task, _ in kept},
            "rollouts": [shown for *_, shown in kept],
            "words": [],
        }
        counts = summary.counts
        return render(
            data,
            title="Traces of agents",
            state=lines[0],
            lines=lines[1:],
            tiles=[(f"{counts[name]:,}", words) for name, words in (
                ("traces", "traces"), ("calls", "LLM calls"), ("trainable", "of them can be learned"),
                ("corrected", "answers that the user corrected"),
            )],
            charts=self._charts(),
            total=counts["traces"],
            rest="groundwire export writes all of them.",
        )  # fmt: skip

    def _charts(self) -> list[Chart]:
        if not self._days:
            return []
        first, series = min(day for day, _ in self._days), dict[str, Series]()
        for (day, name), count in sorted(self._days.items()):
            points = [*(series[name].points if name in series else ()), (day - first + 1, count)]
            series[name] = Series(name=name, points=points)
        date = datetime.fromtimestamp(first * _DAY_S, timezone.utc)
        words = f"Day 1 is {date:%d %b %Y}."
        bars = list(series.values())
        return [Chart(key="days", title="Traces", unit="a day", x="day", stacked=True, series=bars, reading=words)]


def _complaint(rollout: Rollout) -> str:
    """What speaks against a trace; empty if nothing does."""
    facts, outcome = rollout.metadata, rollout.outcome
    if outcome.failure:
        return "ended in an error"
    if facts["corrects"] or facts.get("corrected"):
        return "the user corrects an answer"
    return "" if all(step["ok"] for step in outcome.steps) else "a tool failed"
