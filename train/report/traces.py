"""The report of exported traces: the screen of ``groundwire traces``, and some of the traces."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from groundwire.domains.held_out import question_key
from groundwire.train.report.build import render, shown_rollout, shown_task
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.summary import text_digest

_SHOWN = 200


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
