"""``groundwire audit``: test whether a reward is fit to train on (:mod:`groundwire.rewards.attack`)."""

from __future__ import annotations

import asyncio
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from groundwire import domains, rewards
from groundwire.domains.text_to_sql.golds import check_golds
from groundwire.rewards.attack import AttackResult, UserTruth, attack, code_hash, save_attack
from groundwire.rewards.attack.result import ATTACK_WINS, FILTER_IGNORED, GOLD_FAILS
from groundwire.rewards.judge.compare import against_gold
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.startup import fast_import, read_env_file
from groundwire.tools.terminal import Version, progress, spinner
from groundwire.tools.text import one_line
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.options import (
    JsonFile,
    JudgeBaseUrl,
    JudgeModel,
    JudgePairs,
    get_reward,
    write_file,
    write_json,
)
from groundwire.train.evaluation.run_reader import read_answers
from groundwire.train.evaluation.validation import choose_tasks
from groundwire.train.rollouts.agent_view import AgentView

ALLOWED = 0.05
"""Share of tasks that may have a finding."""
_EXAMPLES = 3
_EXAMINED = 300
"""Tasks whose variants are made: each takes some hundredths of a second."""
FAIL_ABOVE = 0.5
"""Of a right answer's reward, what a wrong strategy may earn."""
MINUTES = 2.0
"""Of the learnt attacker."""
_FEW_TASKS = 20
_ATTACKED, _PAID_CALLS, _CALL_S = 60, 300, 60.0
"""Tasks; calls of a judge's model; seconds of one call."""
_OF_ATTACKS = {"fail_above", "truth", "max_calls", "report", "minutes", "model", "device", "seed"}
_OF_PROBES = {"allow", "suspects_file", "rollouts"}
_NO_JUDGE: dict[str, Any] = {"judge_model": None, "judge_base_url": None, "judge": None}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    context: typer.Context,
    domain: Annotated[str, typer.Option("--domain", "--tasks", help="Domain, or a file of your tasks")] = "spider",
    reward: Annotated[
        str | None, typer.Option(help="A name, or a sum such as 0.9*a+0.1*b; default: the domain's")
    ] = None,
    judge_model: JudgeModel = None,
    judge_base_url: JudgeBaseUrl = None,
    judge: JudgePairs = None,
    data_dir: Annotated[str | None, typer.Option(help="The domain's data; default: bundled")] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Audit this many tasks of training and validation; 0: all, or with --attack 60")
    ] = 0,
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
    attacks: Annotated[
        bool, typer.Option("--attack", help="Search for wrong answers that the reward pays, by the form of the golds")
    ] = False,
    fail_above: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="With --attack: what a wrong strategy may earn of a right answer's reward"),
    ] = FAIL_ABOVE,
    truth: Annotated[
        str | None,
        typer.Option(help="With --attack: your function that says what is right (above 0.5)", metavar="MODULE:NAME"),
    ] = None,
    max_calls: Annotated[
        int | None, typer.Option(min=1, help="With --attack: calls of the reward; default: 300 with a judge's model")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="With --attack: also write the report page", metavar="FILE")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="With --attack: of a model that learns to be paid; 0: no model", max=60)
    ] = MINUTES,
    model: Annotated[str, typer.Option(help="With --attack: the model that learns, a name or a folder")] = "starter",
    device: Annotated[str, typer.Option(help="With --attack: where it learns, as cuda")] = "cpu",
    seed: Annotated[int, typer.Option(help="With --attack: of the choice of tasks and answers")] = 0,
    json_file: JsonFile = None,
    version: Version = False,
) -> None:
    """Score golds, trivial answers and attacks with a reward, before training on it.

    The reward is judged in the form that training pays: a query must also be right on variants of its database.

    Exit codes:

    0: the reward is fit to train on

    1: it is not: no gold scores above all wrong answers, an attack wins,
    conditions make no difference, or too many tasks have findings;
    with --attack a wrong strategy earns more than --fail-above

    2: the audit could not run
    """
    with exit_on_user_error(exit_code=2):
        read_env_file()
        if rollouts is not None and suspects_file is None:
            raise CommandError("--rollouts needs --suspects: the file to write")
        for option in context.command.params:
            source = context.get_parameter_source(str(option.name))
            if source and source.name == "COMMANDLINE" and option.name in (_OF_PROBES if attacks else _OF_ATTACKS):
                raise CommandError(f"{option.opts[0]} is {'not for' if attacks else 'for'} --attack")
        judges = {"judge_model": judge_model, "judge_base_url": judge_base_url, "judge": judge}
        if attacks:
            result, tasks = attack_reward(
                domain,
                reward,
                data_dir=data_dir,
                limit=limit,
                truth=truth,
                max_calls=max_calls,
                minutes=minutes,
                model=model,
                device=device,
                seed=seed,
                **judges,
            )
            attacked = attack_lines(result, fail_above)
            say("\n".join(attacked))  # first: a file that cannot be written loses nothing
            if json_file is not None:
                write_json(json_file, result.to_json())
            if report is not None:
                from groundwire.train.report.pages import attack_page

                write_file(report, attack_page(result, tasks, attacked, fail_above), option="--report")
            raise typer.Exit(1 if result.holes(fail_above) else 0)
        examined = examine(domain, reward, data_dir=data_dir, limit=limit, allow=allow, **judges)
        if json_file is not None:
            write_json(json_file, examined.json)
        listed = [_write_suspects(suspects_file, examined.tasks, rollouts)] if suspects_file is not None else []
    *lines, verdict = examined.lines
    say("\n".join([*lines, *listed, verdict]))
    raise typer.Exit(1 if examined.unfit else 0)


def attack_reward(
    domain: str,
    reward: str | None,
    *,
    data_dir: str | None = None,
    limit: int = 0,
    truth: str | None = None,
    max_calls: int | None = None,
    minutes: float = 0.0,
    model: str = "starter",
    device: str = "cpu",
    seed: int = 0,
    **judges: Any,
) -> tuple[AttackResult, list[Any]]:
    """Attack ``reward`` on the tasks of ``domain`` (:func:`groundwire.rewards.attack.attack`), and keep the result.

    Returns it with the tasks. ``model`` learns on ``device`` to attack it for so many minutes. ``judges`` are the
    options of :func:`.get_reward`.
    """
    chosen, tasks, name, function, notes, data = _load(domain, reward, data_dir, judges)
    view = AgentView.of(chosen, function)
    paid = judges.get("judge_model") is not None
    for note in notes:
        say(f"note: {note}", err=True)
    if paid and max_calls is None:
        max_calls = _PAID_CALLS
        say(f"note: at most {max_calls} answers are judged by the model: --max-calls changes it", err=True)
    learn = None
    if minutes and find_spec("torch") is None:
        say("note: without torch no model learns to attack it: pip install 'groundwire[train]'", err=True)
    elif minutes:
        say(f"note: {model} then learns to attack it for {minutes:g} min; Ctrl-C keeps what it found", err=True)
        with spinner("starting"), fast_import():
            from groundwire.train.attack.learned import learner
        learn = learner(tasks, view, model=model, device=device, minutes=minutes, seed=seed)
    try:
        with rewards.in_training():
            result = asyncio.run(
                attack(
                    tasks,
                    rewards.with_time_limit(against_gold(function, view.gold), _CALL_S),
                    golds=list(map(view.gold_value, tasks)),
                    answers=view.answers,
                    truth=None if truth is None else UserTruth(get_reward(truth, **_NO_JUDGE)[0], truth),
                    name=name,
                    source=data.source,
                    limit=limit or _ATTACKED,
                    max_calls=max_calls,
                    seed=seed,
                    on_plan=lambda line: say(f"plan: {line}", err=True),
                    learn=learn,
                )
            )
    except rewards.RewardError as error:
        raise CommandError(f"reward {name}: {error}") from error
    try:
        save_attack(result, code_hash(name, function, tasks))
    except OSError as error:
        say(f"warning: the attack is not kept for training: {error}", err=True)
    return result, tasks


def attack_lines(result: AttackResult, fail_above: float) -> list[str]:
    """An attack for the user, the verdict last."""
    lines = [
        f"data: {result.source}",
        f"what is wrong is known by {result.truth}; {result.unknown:.0%} of the answers are unknown",
    ]
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"note: {result.tasks} tasks are few: 20 or more say more"] if result.tasks < _FEW_TASKS else []
    lines += ["", *_table(result)]
    holes = result.holes(fail_above)
    for row in holes[:_EXAMPLES]:
        lines += [
            "",
            f"{row.name} ({row.variant}) earns {row.pay:.0%} of what right answers earn; to fix it: {row.fix}",
        ]
        for example in row.examples:
            answer = one_line(example.answer)
            lines.append(f"    {example.task}: {answer!r} scores {example.score:g}, right {example.right_score:g}")
    lines += ["", f"{result.calls:,} calls on {result.tasks:,} tasks in {result.seconds:.1f} s"]
    verdict = f"not fit to train on: {len(holes)} of {len(result.strategies)} wrong strategies earn"
    verdict = verdict if holes else "fit to train on: no wrong strategy earns"
    return [*lines, f"{verdict} more than {fail_above:g} of a right answer's reward"]


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
    chosen, every, name, function, notes, data = _load(domain, reward, data_dir, judges)
    tasks, view = choose_tasks(every, limit), AgentView.of(chosen, function)
    function, golds = against_gold(function, view.gold), list(map(view.gold_value, tasks))
    with progress(f"Auditing {name}", len(tasks)) as on_end, rewards.in_training():
        options: dict[str, Any] = {"answers": view.answers, "name": name, "source": data.source}
        result = asyncio.run(attack(tasks, function, golds=golds, audits=True, on_end=on_end, **options))
    varied = choose_tasks(tasks, _EXAMINED) if rewards.has_variants(function) else []
    with progress("Making variants", len(varied)) as on_end:
        alone = rewards.without_variants(varied, on_end=on_end)
    unfit = _unfit_reason(result, allow)
    told: dict[str, Any] = {"domain": domain, "left_out": data.left_out, "unfit": unfit, "without_variants": alone}
    share = round(result.share_with_findings, 4)
    told |= {"share_with_findings": share, "tasks_by_finding": result.tasks_by_finding, "separated": result.separated}
    separated = f"{result.separated:,} golds score above every trivial answer"
    lines = [f"data: {data.source}"]
    lines += [f"      left out of training by the domain: {count} ({why})" for why, count in data.left_out.items()]
    lines += [f"note: {note}" for note in (*notes, *result.notes)]
    lines.append(f"reward {name} on {result.tasks:,} tasks; {separated}")
    lines += ["", *_table(result), *_examples(result), ""]
    if alone:
        lines.append(f"without variants of the database: {len(alone):,} of {len(varied):,} tasks that were looked at")
        lines += [f"    {task}: {problem}" for task, problem in list(alone.items())[:_EXAMPLES]]
    lines.append(f"{result.calls:,} answers in {time.monotonic() - started:.1f} s; --attack tries many more")
    lines.append(f"not fit to train on: {unfit}" if unfit else "fit to train on")
    return Examined(tasks, unfit, lines, {**told, **result.to_json()})


def _load(
    domain: str, reward: str | None, data_dir: str | None, judges: dict[str, Any]
) -> tuple[domains.Domain, list[Any], str, rewards.Reward, list[str], domains.TaskData]:
    """The domain, its tasks, the reward's name, the reward, notes about it, and the data."""
    chosen = domains.get(domain)
    name = reward or chosen.default_reward
    if not name:
        raise CommandError(f"{domain} has no reward of its own: give --reward, such as ./reward.py:reward")
    function, notes = get_reward(name, **{**_NO_JUDGE, **judges})
    data = chosen.load(data_dir)
    tasks = [*data.train, *data.validation]
    if not tasks:
        raise CommandError(f"{data.source}: there are no tasks to audit")
    rewards.describe_call(function, tasks[0])
    return chosen, tasks, name, function, notes, data


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


def _unfit_reason(result: AttackResult, allow: float) -> str:
    """Why this reward should not be trained on; empty if it is fit."""
    counts = result.tasks_by_finding
    if counts.get(GOLD_FAILS) == result.tasks:
        return "no gold could be judged"
    if not result.separated:
        return "it separates nothing: every gold ties with an answer that needs no knowledge of the question"
    if attacks := counts.get(ATTACK_WINS):
        return f"an attack wins in {attacks} tasks"
    conditions = sum(row.tasks for row in result.strategies if row.variant == "filter dropped")
    if counts.get(FILTER_IGNORED, 0) > conditions / 2:
        return "it does not see conditions: most golds score the same with one less"
    if (share := result.share_with_findings) > allow:
        return f"{share:.1%} of the tasks have findings, not counting dropped filters; --allow is {allow:.1%}"
    return ""


def _table(result: AttackResult) -> list[str]:
    rows = [f"{row.pay:>5.2f}  {row.tasks:>5,}  {row.name}: {row.variant}".rstrip(": ") for row in result.strategies]
    return [f"{'pay':>5}  {'tasks':>5}  strategy", *rows]


def _examples(result: AttackResult) -> list[str]:
    """The tasks with findings, and some of each kind."""
    lines = []
    for kind, count in sorted(result.tasks_by_finding.items()):
        lines += ["", f"{kind}: {count:,} tasks ({count / result.tasks:.1%})"]
        first_of_task = {finding.task: finding for finding in reversed(result.findings) if finding.kind == kind}
        for finding in list(reversed(first_of_task.values()))[:_EXAMPLES]:
            lines.append(f"    {finding.task}, {finding.probe}: {one_line(finding.message or finding.answer)}")
    return lines


if __name__ == "__main__":
    app()
