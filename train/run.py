"""``groundwire run``: train the model behind an agent.

Heavy packages are imported after the arguments are checked, so that ``--help`` and a wrong argument answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file, setup_logging
from groundwire.tools.terminal import Debug, Version, console, show_line
from groundwire.train.api.evaluation import check_endpoint, find_endpoint, run_dev
from groundwire.train.api.training import format_config, make_job, train
from groundwire.train.artifacts.run_dir import RunDir, run_dirs
from groundwire.train.cli.options import SettingsCommand, given_settings, takes_settings, with_preset
from groundwire.train.config.overrides import SETTINGS_FILE, SUFFIXES
from groundwire.train.config.resolve import with_file
from groundwire.train.evaluation.run_reader import untrained

_options: Any = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": "rich"}
app, look, train_app = (typer.Typer(**_options) for _ in range(3))

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="A preset, and settings, e.g. learning_rate=1e-5; with verl also its own",
        metavar="[PRESET] [KEY=VALUE]...",
    ),
]
BaseUrl = Annotated[
    str | None,
    typer.Option(help="OpenAI-compatible endpoint with --model, for look or --trainer gepa; key: OPENAI_API_KEY"),
]
ResumedRun = Annotated[
    str | None, typer.Option(help="Continue this run, e.g. runs/latest", metavar="RUN_DIR", autocompletion=run_dirs)
]
WarmStart = Annotated[
    str | None,
    typer.Option(help="Fine-tune first, on this file's chats or this run's best rollouts", metavar="FILE|RUN_DIR"),
]
Watch = Annotated[bool, typer.Option("--watch", help="Serve the report while it trains")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Show every setting, and stop")]
Diff = Annotated[bool, typer.Option("--diff", help="With --print-config: differences from the published recipe")]
_TRAINER = "verl where CUDA and verl are, else local"


@app.command(cls=SettingsCommand)
@takes_settings(trainer=_TRAINER)
def main(
    settings: dict[str, Any],
    overrides: Overrides = None,
    ci_fast: Annotated[bool, typer.Option("--ci-fast", help="One step, a few validation questions")] = False,
    ci: Annotated[bool, typer.Option("--ci", help="20 steps")] = False,
    dev: Annotated[bool, typer.Option("--dev", help="As look: ten tasks, every call, a verdict")] = False,
    base_url: BaseUrl = None,
    resume: ResumedRun = None,
    show_config: PrintConfig = False,
    diff: Diff = False,
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Train the model behind an agent with GRPO, on this machine.

    Every setting is an option or KEY=VALUE. A preset or a file (--config) changes defaults; docs/settings.md lists all.
    """
    if sum((ci_fast, ci, dev)) > 1:
        raise typer.BadParameter("--ci-fast, --ci and --dev exclude each other")
    short_form = {"steps": 1, "val_tasks": 32} if ci_fast else {"steps": 20} if ci else {}
    with exit_on_user_error(debug):
        given = {**short_form, **given_settings(*with_preset(settings, overrides or []))}
        _run(given, dev, base_url, resume=resume, show_config=show_config, diff=diff, debug=debug)


@look.command(cls=SettingsCommand)
@takes_settings(trainer=_TRAINER)
def look_at(
    settings: dict[str, Any],
    overrides: Overrides = None,
    base_url: BaseUrl = None,
    show_config: PrintConfig = False,
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Run ten tasks without training, print each call, answer and reward, and say whether training can work.

    The settings are those of groundwire.toml, if this folder has one; options win.
    """
    with exit_on_user_error(debug):
        given = _of_this_folder(given_settings(*with_preset(settings, overrides or [])))
        _run(given, True, base_url, show_config=show_config, debug=debug)


@train_app.command(cls=SettingsCommand)
@takes_settings(trainer=_TRAINER)
def train_here(
    settings: dict[str, Any],
    overrides: Overrides = None,
    base_url: BaseUrl = None,
    resume: ResumedRun = None,
    warm_start: WarmStart = None,
    watch: Watch = False,
    show_config: PrintConfig = False,
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Train the model behind an agent with GRPO, on this machine.

    The settings are those of groundwire.toml, if this folder has one; options win.
    """
    with exit_on_user_error(debug):
        given = given_settings(*with_preset(settings, overrides or []))
        given = given if resume else _of_this_folder(given)
        if warm_start and resume:
            raise CommandError("--warm-start and --resume exclude each other: a run that goes on has its model")
        if warm_start and not Path(warm_start).exists():
            raise CommandError(f"--warm-start {warm_start} does not exist: give a file of chats, or a run's folder")
        if warm_start and not show_config:
            given["model"] = _fine_tuned(given, warm_start)
        _run(given, False, base_url, resume=resume, watch=watch, show_config=show_config, debug=debug)


def _fine_tuned(given: dict[str, Any], source: str) -> str:
    """The folder of the model after a supervised run on chats, or on the accepted rollouts of a run."""
    from groundwire.train.config.sft_settings import SFTSettings
    from groundwire.train.sft.run import train_and_print

    kind = "rollouts" if Path(source).is_dir() else "chats"
    names = SFTSettings.model_fields.keys() & {"model", "device", "seed", "max_model_len"}
    own = {kind: source, "output_dir": f"{given.get('output_dir', 'runs')}/warm-start"}
    settings = {name: given[name] for name in names if name in given} | own
    say(f"warm start: fine-tunes {settings.get('model', 'smollm2')} on the {kind} of {source}")
    return str(train_and_print(SFTSettings(**settings), given=settings))


def _of_this_folder(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with the settings of this folder's file, unless another file is named; a preset that is named wins."""
    file, config = Path(SETTINGS_FILE), given.get("config")
    if not file.is_file() or Path(config or "").suffix in SUFFIXES:
        if not given.keys() & {"agent", "backend", "domain", "config"}:
            note = f"note: this folder has no {SETTINGS_FILE}, so the bundled text-to-SQL agent and its tasks are taken"
            say(f"{note}; for your own agent: groundwire init", err=True)
        return given
    with_own = with_file({**given, "config": str(file)})
    return with_own if config is None else {**with_own, "config": config}


def _run(
    given: dict[str, Any],
    dev: bool,
    base_url: str | None,
    *,
    resume: str | None = None,
    watch: bool = False,
    show_config: bool = False,
    diff: bool = False,
    debug: bool = False,
) -> None:
    read_env_file()
    run = RunDir.open(resume) if resume else None
    if run is not None:
        base_url = base_url or run.config().get("base_url")
    endpoint = find_endpoint(base_url, given) if dev or base_url else None
    job = make_job(given, resumed=run, dev=dev, endpoint=endpoint)
    if dev or endpoint is not None:
        check_endpoint(job, dev=dev)
    output = console()
    for note in job.notes:
        say(note, err=show_config)
    if show_config:
        show_line(output, format_config(job, str(run.path) if run else "RUN_DIR", diff=diff))
        return
    setup_logging(debug)
    worked = (
        not run_dev(job, output)[1].problems if dev else not untrained(train(job, run, output, watch=watch).metrics())
    )
    if not worked:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
