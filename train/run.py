"""``python -m train.run``: train the model behind an agent.

Heavy packages are imported after the arguments are checked, so that ``--help`` and a wrong argument answer at once.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groundwire import domains
from groundwire.tools.errors import CommandError, exit_on_user_error, raise_keyboard_interrupt
from groundwire.tools.startup import fast_import, setup_logging
from groundwire.tools.terminal import Version, console, spinner
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.summary import summarize
from groundwire.train.cli.options import given_settings, takes_settings
from groundwire.train.cli.prepare import Job, check_store_settings, default_trainer, format_config, prepare
from groundwire.train.cli.resume import (
    config_for_resume,
    finished,
    relative_path,
    resolve_path,
    save_step_count,
    with_resume_hint,
)
from groundwire.train.config.resolve import resolve, with_file
from groundwire.train.policy import STARTER_NOTES
from groundwire.train.rollouts.factory import make_backend

if TYPE_CHECKING:
    from rich.console import Console

    from groundwire.adapters import Backend

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command()
@takes_settings(trainer="verl where CUDA and verl are, else local")
def main(
    settings: dict[str, Any],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="A setting by its name, e.g. learning_rate=1e-5; with verl any of its own, too",
            metavar="[KEY=VALUE]...",
        ),
    ] = None,
    ci_fast: Annotated[bool, typer.Option("--ci-fast", help="One step, a few validation questions")] = False,
    ci: Annotated[bool, typer.Option("--ci", help="20 steps")] = False,
    dev: Annotated[
        bool, typer.Option("--dev", help="No training: run ten tasks and print every call and triplet")
    ] = False,
    resume: Annotated[
        str | None, typer.Option(help="Continue the run of this run directory, e.g. runs/latest", metavar="RUN_DIR")
    ] = None,
    show_config: Annotated[bool, typer.Option("--print-config", help="Show every setting, and stop")] = False,
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
        given = with_file({**short_form, **given_settings(settings, overrides or [])})
        given |= {name: resolve_path(given[name]) for name in ("model", "data_dir", "token_file") if name in given}
        run = RunDir.open(resume) if resume else None
        if run is None:
            given.setdefault("trainer", default_trainer(given.get("config"), device=given.get("device"), dev=dev))
        config = config_for_resume(run, given) if run else resolve(given.pop("config", None) or "fast", **given)
        check_store_settings(config.external_store_address, config.token_file)
        job = prepare(config, run=run)
        backend = _make_backend(job)
        shown = console()
        for note in job.notes:
            console(stderr=show_config).print(note, markup=False)
        if show_config:
            shown.print(format_config(job, str(run.path) if run else "RUN_DIR"), markup=False)
            return
        setup_logging(debug)
        signal.signal(signal.SIGTERM, raise_keyboard_interrupt)
        if dev:
            _dev(job, backend, shown)
        elif run is not None and (message := _nothing_left(job, run)):
            shown.print(message)
        else:
            _run(job, run, backend, shown)


def _make_backend(job: Job) -> Backend:
    config, data = job.config, job.data
    if not data.train or not data.validation:
        empty = "training" if not data.train else "validation"
        raise CommandError(f"{data.source}: no {empty} tasks are left; the run needs some of both")
    backend = make_backend(config)
    if backend.agents and not any(re.search(config.agent_match or "", name) for name in backend.agents):
        names = ", ".join(backend.agents)
        raise CommandError(f"--agent-match {config.agent_match!r} matches none of its agents: {names}")
    return backend


def _run(job: Job, resumed: RunDir | None, backend: Backend, shown: Console) -> None:
    config = job.config
    if config.trainer == "verl":
        from groundwire.train.verl import launch

        with spinner("starting"):
            launch.check(config, job.data)  # before the run directory is made
    run = resumed or RunDir.create(
        config.output_dir, backend=config.backend, domain=config.domain, config=config.to_dict()
    )
    with run.lock():
        if resumed is not None:
            save_step_count(run, config.steps)
        shown.print(f"run:  {run.path}")
        with with_resume_hint(run):
            summary = _train_verl(job, run) if config.trainer == "verl" else _train(job, run, backend, shown)
    from groundwire.train.cli.progress import show_summary

    show_summary(shown, summary, relative_path(run.path))


def _train(job: Job, run: RunDir, backend: Backend, shown: Console) -> dict[str, Any]:
    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import ProgressDisplay
        from groundwire.train.local.graceful_shutdown import GracefulShutdown
        from groundwire.train.local.trainer import LocalTrainer

    with GracefulShutdown() as shutdown:
        try:
            with ProgressDisplay(shown, job.config.steps) as display:
                LocalTrainer(
                    job.config,
                    data=job.data,
                    domain=job.domain,
                    backend=backend,
                    run=run,
                    callback=display,
                    shutdown=shutdown,
                ).train()
        finally:
            with shutdown.critical_section("writing the summary"):
                summary = _conclude(job, run)
    return summary


def _train_verl(job: Job, run: RunDir) -> dict[str, Any]:
    from groundwire.train.verl import launch

    try:
        launch.train(job.config, job.data, run)
    finally:
        summary = _conclude(job, run)
    return summary


def _nothing_left(job: Job, run: RunDir) -> str:
    """A message if the resumed run has no step left, else an empty text."""
    if not finished(run, job.config):
        return ""
    with run.lock():
        if job.config.trainer == "local":
            with spinner("reading the newest checkpoint"), fast_import():
                from groundwire.train.policy.model import load_initial_state

                note = load_initial_state(job.config, run).note
            if note:  # the newest checkpoint that can be read is older
                typer.echo(f"note: {note}", err=True)
                return ""
        if not run.has_final_files():  # killed after its last step
            _conclude(job, run)
    return finished(run, job.config)


def _conclude(job: Job, run: RunDir) -> dict[str, Any]:
    """Write the summary, the curve and all rollouts of a run that ended in any way; returns the summary."""
    from groundwire.train.report.plots import draw_curve

    if job.config.trainer == "verl":
        from groundwire.train.verl import launch

        launch.collect(run)
    if not (metrics := run.metrics()):
        return {}
    note = STARTER_NOTES[domains.answer_form(job.domain)] if job.config.model == "starter" else ""
    summary = summarize(run, job.config, job.data.source, note=note)
    run.write_json("summary.json", summary)
    with spinner("writing rollouts.parquet and the curve"):
        damaged = run.merge_rollouts()
        draw_curve(metrics, run.path / "curve.png")
    for file in damaged:
        typer.echo(f"warning: {file}, and is left out", err=True)
    return summary


def _dev(job: Job, backend: Backend, shown: Console) -> None:
    from tempfile import TemporaryDirectory

    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import ProgressDisplay, show_rollouts
        from groundwire.train.local.trainer import LocalTrainer

    with TemporaryDirectory() as folder, ProgressDisplay(shown, 0) as display:
        results = LocalTrainer(
            job.config,
            data=job.data,
            domain=job.domain,
            backend=backend,
            run=RunDir(Path(folder)),
            callback=display,
        ).dev()
    show_rollouts(shown, results, job.config.agent_match)


if __name__ == "__main__":
    app()
