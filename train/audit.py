"""``groundwire audit``: test whether a reward is fit to train on (:mod:`groundwire.rewards.audit`)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from groundwire import domains
from groundwire.domains.text_to_sql.golds import check_golds
from groundwire.rewards import has_variants, in_training, without_variants
from groundwire.rewards.audit import ATTACK_WINS, Audit, audit
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file
from groundwire.tools.terminal import Version, progress
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.options import JsonFile, JudgeBaseUrl, JudgeModel, JudgePairs, get_reward, write_json
from groundwire.train.evaluation.run_reader import read_answers
from groundwire.train.rollouts.agent_view import AgentView

ALLOWED = 0.05
"""Share of tasks that may have a finding."""
_EXAMPLES = 3
_EXAMINED = 300
"""Tasks whose variants are made: each takes some hundredths of a second."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    domain: Annotated[str, typer.Option(help="Domain of the tasks")] = "spider",
    reward: Annotated[
        str | None, typer.Option(help="A name, or a sum such as 0.9*a+0.1*b; default: the domain's")
    ] = None,
    judge_model: JudgeModel = None,
    judge_base_url: JudgeBaseUrl = None,
    judge: JudgePairs = None,
    data_dir: Annotated[str | None, typer.Option(help="The domain's data; default: bundled")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Audit this many tasks of training and validation; 0: all")] = 0,
    allow: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of tasks that may have a finding before the exit is 1")
    ] = ALLOWED,
    suspects_file: Annotated[
        Path | None, typer.Option("--suspects", help="Write probably wrong golds to this file", metavar="FILE")
    ] = None,
    rollouts: Annotated[
        str | None,
        typer.Option(help="With --suspects: a run or evaluation whose answers may contradict golds", metavar="RUN_DIR"),
    ] = None,
    json_file: JsonFile = None,
    version: Version = False,
) -> None:
    """Score golds, trivial answers and attacks with a reward, before training on it.

    The reward is judged in the form that training pays: a query must also be right on variants of its database.

    Exit codes:

    0: the reward is fit to train on

    1: it is not: no gold scores above all wrong answers, an attack wins,
    conditions make no difference, or too many tasks have findings

    2: the audit could not run
    """
    with exit_on_user_error(exit_code=2):
        read_env_file()
        if rollouts is not None and suspects_file is None:
            raise CommandError("--rollouts needs --suspects: the file to write")
        judges = {"judge_model": judge_model, "judge_base_url": judge_base_url, "judge": judge}
        examined = examine(domain, reward, data_dir=data_dir, limit=limit, allow=allow, **judges)
        if json_file is not None:
            write_json(json_file, examined.json)
        listed = [_write_suspects(suspects_file, examined.tasks, rollouts)] if suspects_file is not None else []
    *lines, verdict = examined.lines
    say("\n".join([*lines, *listed, verdict]))
    raise typer.Exit(1 if examined.unfit else 0)


class Examined(NamedTuple):
    """The audit of a reward."""

    tasks: list[Any]
    unfit: str
    """Why the reward is not fit to train on; empty if it is."""
    lines: list[str]
    """For the user, the verdict last."""
    json: dict[str, Any]


def examine(
    domain: str,
    reward: str | None,
    *,
    data_dir: str | None = None,
    limit: int = 0,
    allow: float = ALLOWED,
    **judges: Any,
) -> Examined:
    """Audit ``reward`` on the tasks of ``domain``; ``judges`` are the options of :func:`.get_reward`."""
    started = time.monotonic()
    chosen = domains.get(domain)
    name = reward or chosen.default_reward
    function, notes = get_reward(name, **{"judge_model": None, "judge_base_url": None, "judge": None, **judges})
    data = chosen.load(data_dir)
    tasks = _sample([*data.train, *data.validation], limit)
    if not tasks:
        raise CommandError(f"{data.source}: there are no tasks to audit")
    view = AgentView.of(chosen, function)
    golds, databases = list(map(view.gold, tasks)), chosen.database
    with progress(f"Auditing {name}", len(tasks)) as on_end, in_training():
        auditing = audit(tasks, function, golds=golds, answers=view.answers, database=databases, on_end=on_end)
        result = asyncio.run(auditing)
    varied = _sample(tasks, _EXAMINED) if has_variants(function) else []
    with progress("Making variants", len(varied)) as on_end:
        alone = without_variants(varied, on_end=on_end)
    unfit = _unfit_reason(result, allow)
    told = {"domain": domain, "data": data.source, "left_out": data.left_out, "reward": name, "unfit": unfit}
    share = round(result.share_with_findings, 4)
    figures = {"share_with_findings": share, "tasks_by_finding": result.tasks_by_finding}
    lines = [f"data: {data.source}"]
    lines += [f"      left out of training by the domain: {count} ({why})" for why, count in data.left_out.items()]
    lines += [f"note: {note}" for note in notes] + _table(result, name)
    if alone:
        lines.append(f"without variants of the database: {len(alone):,} of {len(varied):,} tasks that were looked at")
        lines += [f"    {task}: {problem}" for task, problem in list(alone.items())[:_EXAMPLES]]
    answers = sum(probe.judged + probe.failed for probe in result.probes)
    lines.append(f"{answers:,} answers in {time.monotonic() - started:.1f} s")
    lines.append(f"not fit to train on: {unfit}" if unfit else "fit to train on")
    return Examined(tasks, unfit, lines, {**told, **figures, "without_variants": alone, **asdict(result)})


def _write_suspects(file: Path, tasks: list[Any], rollouts: str | None) -> str:
    """Write the suspicious golds of ``tasks``, also by the answers of a run; returns a line about them."""
    from groundwire.domains.text_to_sql.suspects import suspects  # imports sqlglot, which takes long

    answers, unreadable = read_answers(RunDir.open(rollouts)) if rollouts is not None else ({}, [])
    for message in unreadable:
        say(f"warning: {message}", err=True)
    if rollouts is not None and not any(str(task["id"]) in answers for task in tasks):
        raise CommandError(f"--rollouts {rollouts} has no answer to these tasks: name a run on this data")
    if not all(task.get("query") and task.get("db_path") for task in tasks):
        raise CommandError("--suspects is for domains whose golds are SQL queries")
    suspicious = suspects(tasks, check_golds(tasks), answers)
    write_json(file, suspicious)
    return f"suspicious golds: {len(suspicious):,} of {len(tasks):,}, listed in {file}"


def _sample(tasks: list[Any], limit: int) -> list[Any]:
    if not 0 < limit < len(tasks):
        return tasks
    return [tasks[i * len(tasks) // limit] for i in range(limit)]


def _unfit_reason(result: Audit, allow: float) -> str:
    """Why this reward should not be trained on; empty if it is fit."""
    if not any(probe.judged for probe in result.probes if probe.kind == "gold"):
        return "no gold could be judged"
    if not result.separated:
        return "it separates nothing: every gold ties with an answer that needs no knowledge of the question"
    if attacks := result.tasks_by_finding.get(ATTACK_WINS):
        return f"an attack wins in {attacks} tasks"
    if any(probe.kind == "weaker" and probe.wins > probe.judged / 2 for probe in result.probes):
        return "it does not see conditions: most golds score the same with one less"
    if (share := result.share_with_findings) > allow:
        return f"{share:.1%} of the tasks have findings, not counting dropped filters; --allow is {allow:.1%}"
    return ""


def _table(result: Audit, name: str) -> list[str]:
    lines = [f"reward {name} on {result.tasks:,} tasks; {result.separated:,} golds score above every trivial answer"]
    lines += ["", f"{'probe':<18}{'kind':<9}{'judged':>8}{'failed':>8}{'mean':>8}{'wins':>8}"]
    for probe in result.probes:
        mean = "-" if probe.mean is None else f"{probe.mean:.3f}"
        wins = "" if probe.kind == "gold" else f"{probe.wins:,}"
        lines.append(f"{probe.name:<18}{probe.kind:<9}{probe.judged:>8,}{probe.failed:>8,}{mean:>8}{wins:>8}")
    for kind, count in sorted(result.tasks_by_finding.items()):
        lines += ["", f"{kind}: {count:,} tasks ({count / result.tasks:.1%})"]
        first_of_task = {finding.task: finding for finding in reversed(result.findings) if finding.kind == kind}
        for finding in list(reversed(first_of_task.values()))[:_EXAMPLES]:
            text = " ".join((finding.message or finding.answer).split())[:140]
            lines.append(f"    {finding.task}, {finding.probe}: {text}")
    return [*lines, ""]


if __name__ == "__main__":
    app()
