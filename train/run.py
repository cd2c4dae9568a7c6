"""``groundwire run``: train the model behind an agent.

Heavy packages are imported after the arguments are checked, so that ``--help`` and a wrong argument answer at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.startup import read_env_file, setup_logging
from groundwire.tools.terminal import Version, console
from groundwire.train.api.evaluation import check_endpoint, find_endpoint, run_dev
from groundwire.train.api.training import format_config, make_job, train
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.cli.options import SettingsCommand, given_settings, takes_settings, with_preset
from groundwire.train.evaluation.run_reader import untrained

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(cls=SettingsCommand)
@takes_settings(trainer="verl where CUDA and verl are, else local")
def main(
    settings: dict[str, Any],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="A preset, and settings by their names, e.g. learning_rate=1e-5; with verl any of its own, too",
            metavar="[PRESET] [KEY=VALUE]...",
        ),
    ] = None,
    ci_fast: Annotated[bool, typer.Option("--ci-fast", help="One step, a few validation questions")] = False,
    ci: Annotated[bool, typer.Option("--ci", help="20 steps")] = False,
    dev: Annotated[
        bool,
        typer.Option("--dev", help="No training: run ten tasks, print every call and triplet, and a verdict"),
    ] = False,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="With --dev or --trainer gepa: an OpenAI-compatible endpoint that has --model. Its key is "
            "OPENAI_API_KEY"
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Continue the run of this run directory, e.g. runs/latest", metavar="RUN_DIR")
    ] = None,
    show_config: Annotated[bool, typer.Option("--print-config", help="Show every setting, and stop")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="With --print-config: show what differs from the published recipe")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log everything, and show tracebacks")] = False,
    version: Version = False,
) -> None:
    """Train the model behind an agent with GRPO, on this machine.

    Every setting is an option or KEY=VALUE. A preset or a file (--config) changes defaults; docs/settings.md lists all.
    """
    if sum((ci_fast, ci, dev)) > 1:
        raise typer.BadParameter("--ci-fast, --ci and --dev exclude each other")
    short_form = {"steps": 1, "val_tasks": 32} if ci_fast else {"steps": 20} if ci else {}
    with exit_on_user_error(debug):
        read_env_file()
        given = {**short_form, **given_settings(*with_preset(settings, overrides or []))}
        run = RunDir.open(resume) if resume else None
        if run is not None:
            base_url = base_url or run.config().get("base_url")
        endpoint = find_endpoint(base_url, given) if dev or base_url else None
        job = make_job(given, resumed=run, dev=dev, endpoint=endpoint)
        if dev or endpoint is not None:
            check_endpoint(job, dev=dev)
        output = console()
        for note in job.notes:
            console(stderr=show_config).print(note, markup=False)
        if show_config:
            output.print(format_config(job, str(run.path) if run else "RUN_DIR", diff=diff), markup=False)
            return
        setup_logging(debug)
        worked = run_dev(job, output) if dev else not untrained(train(job, run, output).metrics())
        if not worked:
            raise typer.Exit(1)


if __name__ == "__main__":
    app()
