"""``python -m rewards.audit``: is this reward fit to train on, with this data? Asked before a GPU is paid for.

Every task's gold goes through the reward, and beside it what a policy would find if it were paid for it: nothing at
all, constants, another task's gold, the gold with a condition less, stacked statements, injections. A probe *wins* when
it scores at least what the gold scores; one reward or another gives partial credit, and that is no fault.

:func:`audit` takes tasks and a reward and knows no domain. Only the command below does, and imports them when it is
run: ``import rewards`` stays light, and the room imports nothing above it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from groundwire.rewards._probes import Probe, probes
from groundwire.rewards._scoring import Score, each_at_once, score
from groundwire.rewards._types import Reward
from groundwire.rewards.judge.settings import JudgeSettingsError
from groundwire.tools.plugins import PluginError, UnknownNameError
from groundwire.tools.terminal import Version, progress
from groundwire.train.cli.judge_options import JsonFile, JudgeBaseUrl, JudgeModel, JudgePairs, chosen, fail, write_json

__all__ = ["Audit", "Finding", "ProbeLine", "app", "audit"]

_SLACK = 1e-9
_EXAMPLES = 3
GOLD_FAILS, GOLD_LOSES, GOLD_IS_EMPTY = "gold fails", "gold scores nothing", "gold returns nothing"
REWARD_FAILS, WINS = "reward fails", {"trivial": "trivial answer wins", "weaker": "filter dropped and still wins"}
WINS["attack"] = "attack wins"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with one task."""

    task: str
    kind: str
    probe: str
    answer: str
    score: float | None
    gold: float | None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeLine:
    """What became of one probe over all tasks. ``mean`` is of those judged, None where none was."""

    name: str
    kind: str
    judged: int
    failed: int
    mean: float | None
    wins: int


@dataclass(frozen=True, kw_only=True)
class Audit:
    """``separated`` counts the tasks whose gold scores more than every trivial answer and attack."""

    tasks: int
    separated: int
    probes: list[ProbeLine]
    findings: list[Finding]

    @property
    def by_kind(self) -> dict[str, int]:
        """How many tasks have a finding of each kind."""
        return dict(Counter(kind for kind, _ in sorted({(found.kind, found.task) for found in self.findings})))

    @property
    def share(self) -> float:
        """The share of tasks with a finding. That a dropped condition makes no difference is the database's fault."""
        counted = {found.task for found in self.findings if found.kind != WINS["weaker"]}
        return len(counted) / max(1, self.tasks)


async def audit(
    tasks: Sequence[Mapping[str, Any]],
    reward: Reward,
    *,
    database: Callable[[Mapping[str, Any]], str],
    on_end: Callable[[], None] = lambda: None,
) -> Audit:
    """Probe ``reward`` on ``tasks``; ``database`` gives the path of a task's SQLite file, ``on_end`` hears of each."""
    golds = [str(task.get("query", task.get("answer", ""))) for task in tasks]

    async def one(place: int) -> list[tuple[Probe, Score]]:
        task, another = tasks[place], golds[(place + len(golds) // 2) % len(golds)]
        tried = await asyncio.to_thread(probes, task, database=database(task), another=another)
        return [(probe, await score(reward, task, probe.answer, probe.steps)) for probe in tried]

    judged = await each_at_once(one, range(len(tasks)), on_end=on_end)
    lines: dict[str, list[tuple[Probe, Score, bool]]] = defaultdict(list)
    findings: list[Finding] = []
    separated = 0
    for task, results in zip(tasks, judged, strict=True):
        gold = results[0][1].value
        for probe, scored in results:
            wins = probe.kind != "gold" and _wins(scored.value, gold)
            lines[probe.name].append((probe, scored, wins))
            if kind := _kind(probe, scored, wins, gold):
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
        separated += gold is not None and gold > max(others) + _SLACK
    return Audit(
        tasks=len(tasks), separated=separated, probes=[_line(*each) for each in lines.items()], findings=findings
    )


def _wins(value: float | None, gold: float | None) -> bool:
    """Whether an answer earns what the gold does, where that is something."""
    return value is not None and gold is not None and gold > 0 and value >= gold - _SLACK


def _kind(probe: Probe, scored: Score, wins: bool, gold: float | None) -> str:
    """What is wrong with a probe's score; empty where nothing is."""
    if probe.kind == "gold":
        if gold is None:
            return GOLD_FAILS
        if gold <= 0:
            return GOLD_LOSES
        return GOLD_IS_EMPTY if probe.rows == 0 else ""
    if scored.value is None:
        return REWARD_FAILS if gold is not None else ""  # without a gold nothing can be judged: said once is enough
    return WINS[probe.kind] if wins else ""


def _line(name: str, results: Sequence[tuple[Probe, Score, bool]]) -> ProbeLine:
    values = [scored.value for _, scored, _ in results if scored.value is not None]
    return ProbeLine(
        name=name,
        kind=results[0][0].kind,
        judged=len(values),
        failed=len(results) - len(values),
        mean=round(sum(values) / len(values), 4) if values else None,
        wins=sum(wins for *_, wins in results),
    )


# -- the command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    domain: Annotated[str, typer.Option(help="What is asked")] = "spider",
    reward: Annotated[str | None, typer.Option(help="A name, or a sum: 0.9*a+0.1*b. Default: the domain's own")] = None,
    judge_model: JudgeModel = None,
    judge_base_url: JudgeBaseUrl = None,
    judge: JudgePairs = None,
    data_dir: Annotated[str | None, typer.Option(help="The domain's data. Default: what is bundled")] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Audit this many tasks, spread over training and validation; 0 is all")
    ] = 0,
    allow: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of tasks that may have a finding before the exit is 1")
    ] = 0.05,
    json_file: JsonFile = None,
    version: Version = False,
) -> None:
    """Try a reward on golds, trivial answers and attacks, before training on it.

    Exits with 0 where the reward is fit to train on, 1 where it is not (nothing told apart, an attack that wins,
    conditions not seen, too many tasks with findings), 2 where it could not be asked.
    """
    from groundwire import domains

    started = time.monotonic()
    try:
        asked = domains.get(domain)
        name = reward or asked.default_reward
        ask, told = chosen(name, judge_model=judge_model, judge_base_url=judge_base_url, judge=judge)
        data = asked.load(data_dir)
    except (UnknownNameError, PluginError, JudgeSettingsError, domains.DataError) as error:
        fail(error)
    except OSError as error:
        fail(f"{error.strerror or error} ({error.filename or data_dir})")
    tasks = _spread([*data.train, *data.validation], limit)
    if not tasks:
        fail(f"{data.source}: there are no tasks to audit")
    with progress("Auditing", len(tasks)) as on_end:
        found = asyncio.run(audit(tasks, ask, database=asked.database, on_end=on_end))
    unfit = _unfit(found, allow)
    if json_file is not None:
        about = {"domain": domain, "reward": name, "data": data.source, "left_out": data.left_out, "unfit": unfit}
        write_json(json_file, {**about, **_report(found)})
    typer.echo(f"data: {data.source}")
    for reason, count in data.left_out.items():
        typer.echo(f"      left out of training by the domain: {count} ({reason})")
    for sentence in told:
        typer.echo(f"note: {sentence}")
    typer.echo("\n".join(_table(found, name)))
    answers = sum(line.judged + line.failed for line in found.probes)
    typer.echo(f"{answers:,} answers in {time.monotonic() - started:.1f} s")
    typer.echo(f"not fit to train on: {unfit}" if unfit else "fit to train on")
    raise typer.Exit(1 if unfit else 0)


def _report(found: Audit) -> dict[str, Any]:
    return {
        "tasks": found.tasks,
        "separated": found.separated,
        "share_with_findings": round(found.share, 4),
        "tasks_by_finding": found.by_kind,
        "probes": [asdict(line) for line in found.probes],
        "findings": [asdict(each) for each in found.findings],
    }


def _spread(tasks: list[Any], limit: int) -> list[Any]:
    if not 0 < limit < len(tasks):
        return tasks
    return [tasks[i * len(tasks) // limit] for i in range(limit)]


def _unfit(found: Audit, allow: float) -> str:
    """Why this reward should not be trained on; empty where it may be."""
    if not any(line.judged for line in found.probes if line.kind == "gold"):
        return "no gold could be judged"
    if not found.separated:
        return "it separates nothing: no gold scores more than what is known without the question"
    if attacks := found.by_kind.get(WINS["attack"]):
        return f"an attack wins in {attacks} tasks"
    if any(line.kind == "weaker" and line.wins > line.judged / 2 for line in found.probes):
        return "it does not see conditions: most golds score the same with one less"
    if found.share > allow:
        return f"{found.share:.1%} of the tasks have findings, not counting dropped filters; --allow says {allow:.1%}"
    return ""


def _table(found: Audit, name: str) -> list[str]:
    lines = [
        f"reward {name} on {found.tasks:,} tasks, {found.separated:,} of them told apart from every trivial answer"
    ]
    lines += ["", f"{'probe':<18}{'kind':<9}{'judged':>8}{'failed':>8}{'mean':>8}{'wins':>8}"]
    for line in found.probes:
        mean = "-" if line.mean is None else f"{line.mean:.3f}"
        wins = "" if line.kind == "gold" else f"{line.wins:,}"
        lines.append(f"{line.name:<18}{line.kind:<9}{line.judged:>8,}{line.failed:>8,}{mean:>8}{wins:>8}")
    for kind, count in sorted(found.by_kind.items()):
        lines += ["", f"{kind}: {count:,} tasks ({count / found.tasks:.1%})"]
        by_task = {each.task: each for each in reversed(found.findings) if each.kind == kind}  # the first of each
        for each in list(reversed(by_task.values()))[:_EXAMPLES]:
            lines.append(f"    {each.task}, {each.probe}: {' '.join((each.message or each.answer).split())[:140]}")
    return [*lines, ""]


if __name__ == "__main__":
    app()
