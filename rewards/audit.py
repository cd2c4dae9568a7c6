"""Test whether a reward is fit to train on, before a GPU is paid for.

The reward scores the gold answer of every task, and the answers that a policy could exploit: an empty
answer, constants, another task's gold, the gold with one condition less, stacked statements, prompt injections. A probe
*wins* when it scores at least as much as the gold. Partial credit below the gold is fine.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.rewards._types import Reward
from groundwire.rewards.probes import Probe, probes
from groundwire.rewards.scoring import Score, map_concurrently, score
from groundwire.tools.types import AnswerKind

__all__ = ["ATTACK_WINS", "Audit", "Finding", "ProbeSummary", "audit"]

_TOLERANCE = 1e-9
ATTACK_WINS, _FILTER_IGNORED = "attack wins", "filter dropped and still wins"
_WINS = {"trivial": "trivial answer wins", "weaker": _FILTER_IGNORED, "attack": ATTACK_WINS}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A probe of one task whose score is wrong. ``score`` or ``gold`` is None where the reward raised an error."""

    task: str
    kind: str
    probe: str
    answer: str
    score: float | None
    gold: float | None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeSummary:
    """One probe over all tasks; ``mean`` is over the scores that were computed, None if there are none."""

    name: str
    kind: str
    judged: int
    failed: int
    mean: float | None
    wins: int


@dataclass(frozen=True, kw_only=True)
class Audit:
    """``separated`` counts the tasks whose gold scores more than every trivial answer and every attack."""

    tasks: int
    separated: int
    probes: list[ProbeSummary]
    findings: list[Finding]

    @property
    def tasks_by_finding(self) -> dict[str, int]:
        """The number of tasks with a finding of each kind."""
        return dict(Counter(kind for kind, _ in sorted({(each.kind, each.task) for each in self.findings})))

    @property
    def share_with_findings(self) -> float:
        """The share of tasks with a finding, 0 to 1, without conditions that make no difference in the database."""
        return len({each.task for each in self.findings if each.kind != _FILTER_IGNORED}) / max(1, self.tasks)


async def audit(
    tasks: Sequence[Mapping[str, Any]],
    reward: Reward,
    *,
    golds: Sequence[str],
    database: Callable[[Mapping[str, Any]], str],
    answers: AnswerKind,
    on_end: Callable[[], None] = lambda: None,
) -> Audit:
    """Probe ``reward`` on ``tasks``, whose answers are ``answers``.

    ``golds`` are the tasks' gold answers, ``database`` returns the path of a task's SQLite file. ``on_end`` is called
    after each task.
    """

    async def probe_task(index: int) -> list[tuple[Probe, Score]]:
        task, gold, another = tasks[index], golds[index], golds[(index + len(golds) // 2) % len(golds)]
        about: dict[str, Any] = {"gold": gold, "another": another, "database": database(task), "answers": answers}
        tried = await asyncio.to_thread(probes, task, **about)
        return [(probe, await score(reward, task, probe.answer, probe.steps)) for probe in tried]

    by_probe: dict[str, list[tuple[Probe, Score, bool]]] = defaultdict(list)
    findings: list[Finding] = []
    separated = 0
    for task, results in zip(tasks, await map_concurrently(probe_task, range(len(tasks)), on_end=on_end), strict=True):
        gold = results[0][1].value
        for probe, scored in results:
            wins = probe.kind != "gold" and _wins(scored.value, gold)
            by_probe[probe.name].append((probe, scored, wins))
            if kind := _finding_kind(probe, scored, wins, gold):
                findings.append(
                    Finding(
                        task=str(task["id"]),
                        kind=kind,
                        probe=probe.name,
                        answer=probe.answer,
                        score=scored.value,
                        gold=gold,
                        message=scored.error,
                    )
                )
        others = [scored.value or 0.0 for probe, scored in results if probe.kind in ("trivial", "attack")]
        separated += gold is not None and gold > max(others) + _TOLERANCE
    return Audit(
        tasks=len(tasks),
        separated=separated,
        probes=[_summary(name, results) for name, results in by_probe.items()],
        findings=findings,
    )


def _wins(value: float | None, gold: float | None) -> bool:
    """Whether an answer earns as much as a gold that earns something."""
    return value is not None and gold is not None and gold > 0 and value >= gold - _TOLERANCE


def _finding_kind(probe: Probe, scored: Score, wins: bool, gold: float | None) -> str:
    """The fault that a probe's score shows; empty if there is none."""
    if probe.kind == "gold":
        if gold is None:
            return "gold fails"
        if gold <= 0:
            return "gold scores nothing"
        return "gold returns nothing" if probe.rows == 0 else ""
    if scored.value is None:
        return "reward fails" if gold is not None else ""  # the gold's own finding is enough
    return _WINS[probe.kind] if wins else ""


def _summary(name: str, results: Sequence[tuple[Probe, Score, bool]]) -> ProbeSummary:
    values = [scored.value for _, scored, _ in results if scored.value is not None]
    return ProbeSummary(
        name=name,
        kind=results[0][0].kind,
        judged=len(values),
        failed=len(results) - len(values),
        mean=round(sum(values) / len(values), 4) if values else None,
        wins=sum(wins for *_, wins in results),
    )
