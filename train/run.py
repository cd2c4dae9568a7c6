"""``python -m train.run``: train the model behind an agent.

Heavy packages are imported after the arguments are checked, so that ``--help`` and a wrong argument answer at once.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groundwire import adapters, domains
from groundwire.tools.errors import CommandError
from groundwire.tools.exit import exit_on_user_error, raise_keyboard_interrupt
from groundwire.tools.fast_import import fast_import
from groundwire.tools.log_setup import setup_logging
from groundwire.tools.terminal import Version, console, spinner
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.summary import summarize
from groundwire.train.artifacts.tracking import check_trackers
from groundwire.train.cli.judge_options import check_judge
from groundwire.train.cli.options import given_settings, takes_settings
from groundwire.train.cli.resume import config_for_resume, finished, pin_data_dir, resolve_path, save_step_count
from groundwire.train.cli.trainer_choice import default_trainer, print_config
from groundwire.train.config.resolve import resolve, with_file
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy import STARTER_NOTES
from groundwire.train.rollouts.errors import EventLoopError, RolloutsFailedError
from groundwire.train.rollouts.factory import make_backend
from groundwire.train.store.errors import StoreFailedError, StoreGoneError
from groundwire.train.store.health import check_store

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class _Job:
    """A checked run: everything that a trainer needs, before anything is written."""

    config: RunConfig
    data: domains.TaskData
    domain: domains.Domain
    backend: adapters.Backend
    console: Console


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
        str | None, typer.Option(help="Continue the run in this folder, e.g. runs/latest", metavar="RUN_DIR")
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
        given |= {name: resolve_path(given[name]) for name in ("model", "data_dir") if name in given}
        run = RunDir.open(resume) if resume else None
        if run is None:
            given.setdefault("trainer", default_trainer(given.get("config"), device=given.get("device"), dev=dev))
        config = config_for_resume(run, given) if run else resolve(given.pop("config", None) or "fast", **given)
        shown = console()
        job = _check(config, run, shown, notes=console(stderr=True) if show_config else shown)
        if show_config:
            shown.print(print_config(job.config, job.data, str(run.path) if run else "RUN_DIR"), markup=False)
            return
        setup_logging(debug)
        signal.signal(signal.SIGTERM, raise_keyboard_interrupt)
        if dev:
            _dev(job)
        elif run is not None and (done := _nothing_left(job, run)):
            shown.print(done)
        else:
            _run(job, run)


def _check(config: RunConfig, run: RunDir | None, shown: Console, *, notes: Console) -> _Job:
    """Check everything that can be checked before anything is written; print data and reward."""
    check_trackers(config.track)
    _check_store(config.external_store_address)
    adapters.check(config.backend)
    domain = domains.get(config.domain)
    reward_notes = check_judge(config.reward or domain.default_reward, config.judge)
    data = domain.load(config.data_dir)
    config = pin_data_dir(config, data, run)
    notes.print(f"data: {data.source}")
    for reason, count in data.left_out.items():
        notes.print(f"      left out of training: {count} ({reason})")
    if not data.train or not data.validation:
        empty = "training" if not data.train else "validation"
        raise CommandError(f"{data.source}: no {empty} tasks are left; the run needs some of both")
    for note in reward_notes:
        notes.print(f"reward: {note}", markup=False)
    _check_model(config.model, config.trainer)
    backend = make_backend(config)
    if backend.agents and not any(re.search(config.agent_match or "", name) for name in backend.agents):
        names = ", ".join(backend.agents)
        raise CommandError(f"--agent-match {config.agent_match!r} matches none of its agents: {names}")
    return _Job(config, data, domain, backend, shown)


def _run(job: _Job, resumed: RunDir | None) -> None:
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
        job.console.print(f"run:  {run.path}")
        with _how_to_continue(run):
            summary = _train_verl(job, run) if config.trainer == "verl" else _train(job, run)
    from groundwire.train.cli.progress import show_summary

    show_summary(job.console, summary, _relative(run.path))


def _train(job: _Job, run: RunDir) -> dict[str, Any]:
    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import ProgressDisplay
        from groundwire.train.local.graceful_shutdown import GracefulShutdown
        from groundwire.train.local.trainer import LocalTrainer

    with GracefulShutdown() as shutdown:
        try:
            with ProgressDisplay(job.console, job.config.steps) as display:
                LocalTrainer(
                    job.config,
                    data=job.data,
                    domain=job.domain,
                    backend=job.backend,
                    run=run,
                    callback=display,
                    shutdown=shutdown,
                ).train()
        finally:
            with shutdown.critical_section("writing the summary"):
                summary = _conclude(job, run)
    return summary


def _train_verl(job: _Job, run: RunDir) -> dict[str, Any]:
    from groundwire.train.verl import launch

    try:
        launch.train(job.config, job.data, run)
    except launch.TrainingError as error:
        raise CommandError(f"{error}; {_kept(run)}", 1) from error
    finally:
        summary = _conclude(job, run)
    return summary


@contextmanager
def _how_to_continue(run: RunDir) -> Iterator[None]:
    """Adds to the error that ends a training run what is kept of it, and the command that continues it."""
    from groundwire.adapters.tracing.span_writer import SpansNotStoredError

    try:
        yield
    except KeyboardInterrupt:
        raise CommandError(f"stopped; {_kept(run)}", 130) from None
    except RolloutsFailedError as error:
        raise CommandError(f"{error}; {_kept(run)}. More: python -m train.why {_relative(run.path)}", 1) from error
    except EventLoopError as error:
        raise EventLoopError(f"{error}; {_kept(run)}") from error
    except (StoreGoneError, StoreFailedError, SpansNotStoredError) as error:
        raise CommandError(f"{error}; {_kept(run)}", 1) from error


def _nothing_left(job: _Job, run: RunDir) -> str:
    """A message for a resumed run that has no step left; empty if there is one."""
    if not finished(run, job.config):
        return ""
    with run.lock():
        if job.config.trainer == "local":
            with spinner("reading the newest checkpoint"), fast_import():
                from groundwire.train.policy.checkpoint import load_initial_state

                note = load_initial_state(job.config, run).note
            if note:  # the newest checkpoint that can be read is older
                typer.echo(f"note: {note}", err=True)
                return ""
        if not run.has_final_files():  # killed after its last step
            _conclude(job, run)
    return finished(run, job.config)


def _conclude(job: _Job, run: RunDir) -> dict[str, Any]:
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


def _check_store(address: str | None) -> None:
    """Check the store's address against ``AGL_MANAGED_STORE``, Agent Lightning's switch for a store of the trainer."""
    name = "AGL_MANAGED_STORE"
    value = os.environ.get(name, "").strip().lower()
    if value not in ("", *_YES, *_NO):
        raise CommandError(f"{name} is {value!r}; it is one of {', '.join((*_YES, *_NO))}")
    if value in _NO and address is None:
        raise CommandError(f"{name}={value} says that the store is somewhere else: give its --external-store-address")
    if value in _YES and address is not None:
        raise CommandError(
            f"{name}={value} asks for a store in the trainer, --external-store-address for {address}: give one"
        )
    if address is not None:
        check_store(address)


def _check_model(model: str, trainer: str) -> None:
    if trainer == "verl" and not Path(model).exists() and model.count("/") == 1:
        return  # a name on the model hub
    if model != "starter" and not (Path(model) / "config.json").is_file():
        raise CommandError(
            f"no model in {model}: it has no config.json. Give 'starter' or a folder saved by transformers"
        )


def _dev(job: _Job) -> None:
    from tempfile import TemporaryDirectory

    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import ProgressDisplay, show_rollouts
        from groundwire.train.local.trainer import LocalTrainer

    with TemporaryDirectory() as folder, ProgressDisplay(job.console, 0) as display:
        results = LocalTrainer(
            job.config,
            data=job.data,
            domain=job.domain,
            backend=job.backend,
            run=RunDir(Path(folder)),
            callback=display,
        ).dev()
    show_rollouts(job.console, results, job.config.agent_match)


def _kept(run: RunDir) -> str:
    """What is kept of the run, and the command that continues it."""
    if run.is_empty():
        return "nothing was done yet"
    kept = (
        f"what was learnt up to step {saved} is kept"
        if (saved := run.checkpoints.last_step())
        else "there is no checkpoint yet"
    )
    return f"{kept}. Go on with: python -m train.run --resume {_relative(run.path)}"


def _relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    app()
