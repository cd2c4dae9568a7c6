"""``python -m train.evaluate``: evaluate a model under an agent, or tabulate and compare runs.

Without a run directory it evaluates a model and writes a run directory, as training does. With run directories it only
reads them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from groundwire import domains
from groundwire.tools.errors import CommandError, exit_on_user_error, raise_keyboard_interrupt
from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import Version, console, spinner
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.cli.options import given_settings, takes_settings
from groundwire.train.cli.prepare import prepare
from groundwire.train.cli.resume import resolve_path
from groundwire.train.cli.trained_model import with_settings_of_run
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve, with_file
from groundwire.train.config.run_config import AgentSettings, RunConfig
from groundwire.train.evaluation.table import comparison, details, table

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_REMOTE_RUNNERS = 16
_DEFAULTS = {"val_tasks": 0, "val_temperature": 0.0, "output_dir": "evaluations"}
_OPTIONS = {
    **{name: name for name in AgentSettings.model_fields if name != "judge"},
    **{name: name for name in ("config", "model", "data_dir", "output_dir", "device", "seed", "n_runners")},
    **{name: name for name in ("max_tokens", "max_model_len", "retries", "step_deadline_s")},
    "val_temperature": "temperature",
    "val_tasks": "tasks",
}
"""The settings of an evaluation, and the names of their options."""


@app.command()
@takes_settings(_OPTIONS, **_DEFAULTS, config="fast, with --base-url hf")
def main(
    settings: dict[str, Any],
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Show these runs, of training or of evaluation, as a table; or a setting of an evaluation by its name",
            metavar="[RUN_DIR|KEY=VALUE]...",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With two runs: question by question, with McNemar's exact test")
    ] = False,
    base_url: Annotated[
        str | None, typer.Option(help="Any OpenAI-compatible endpoint that has --model, e.g. http://127.0.0.1:8000/v1")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(help="With --base-url: the environment variable that has its key", metavar="NAME")
    ] = "OPENAI_API_KEY",
    samples: Annotated[int, typer.Option("--samples", "-n", help="Rollouts per question", min=1)] = 1,
    form: Annotated[
        Literal["text", "markdown", "json"], typer.Option("--format", help="Format of the output")
    ] = "text",
    version: Version = False,
) -> None:
    """Evaluate a model under an agent, or read runs: a table, or two compared question by question."""
    pairs = [each for each in runs or [] if "=" in each and not Path(each).exists()]
    folders = [each for each in runs or [] if each not in pairs]
    if compare and len(folders) != 2:
        raise typer.BadParameter(f"--compare needs two runs, and {len(folders)} are given")
    with exit_on_user_error():
        if folders:
            with spinner("reading the runs"):
                text = _show_runs(folders, compare=compare, form=form)
        else:
            config = _resolve(given_settings(settings, pairs, names=_OPTIONS), base_url)
            text = _evaluate(config, base_url=base_url, api_key_env=api_key_env, samples=samples, form=form)
        typer.echo(text)


def _resolve(given: dict[str, Any], base_url: str | None) -> RunConfig:
    """The settings of an evaluation; an endpoint has other defaults than a model that is served here.

    A model that a run trained has the settings of its run.
    """
    remote = {"n_runners": _REMOTE_RUNNERS} if base_url else {}
    given = with_file(given)
    given = {**_DEFAULTS, **remote, "trainer": "local", **(given if base_url else with_settings_of_run(given))}
    paths = ("data_dir",) if base_url else ("model", "data_dir")
    given |= {name: resolve_path(given[name]) for name in paths if name in given}
    return resolve(given.pop("config", None) or ("hf" if base_url else "fast"), **given)


def _show_runs(paths: list[str], *, compare: bool, form: str) -> str:
    from groundwire.train.evaluation.metrics import compare as compared
    from groundwire.train.evaluation.run_reader import final_rows, table_entry

    runs = [RunDir.open(path) for path in paths]
    if not compare:
        return table([table_entry(run) for run in runs], form)
    try:
        result = compared(*(final_rows(run) for run in runs))
    except ValueError as error:
        raise RunDirError(f"{paths[0]} and {paths[1]} cannot be compared: {error}") from error
    return comparison(result, [run.path.name for run in runs], form)


def _evaluate(config: RunConfig, *, base_url: str | None, api_key_env: str, samples: int, form: str) -> str:
    with spinner("starting"), fast_import():
        from groundwire.tools.startup import setup_logging
        from groundwire.train.cli.progress import ProgressDisplay
        from groundwire.train.evaluation.evaluator import evaluate
        from groundwire.train.evaluation.probe_endpoint import probe_endpoint
        from groundwire.train.evaluation.run_reader import table_entry
        from groundwire.train.rollouts.runtime import Upstream

    job = prepare(config, own_model=base_url is None)
    config, data, domain = job.config, job.data, job.domain
    if not data.validation:
        raise ConfigError(f"{data.source}: there are no validation tasks")
    setup_logging()
    signal.signal(signal.SIGTERM, raise_keyboard_interrupt)
    upstream = None
    if base_url is not None:
        sampling = {"temperature": config.val_temperature, "max_tokens": config.max_tokens, "seed": config.seed}
        api_key = os.environ.get(api_key_env)
        probe = probe_endpoint(base_url, model=config.model, api_key=api_key, sampling=sampling)
        upstream = Upstream(base_url=base_url.rstrip("/"), model=config.model, api_key=api_key, ids=probe.accepts_ids)
    stored = config.to_dict() | {"steps": 0, "evaluation": {"samples": samples, "base_url": base_url}}
    run = RunDir.create(config.output_dir, backend=config.backend, domain=config.domain, config=stored)
    shown = console(stderr=True)
    for note in job.notes:
        shown.print(note, markup=False)
    shown.print(f"run:  {run.path}", markup=False)
    with run.lock(), ProgressDisplay(shown, 0) as display:
        try:
            evaluate(config, data=data, domain=domain, run=run, callback=display, samples=samples, upstream=upstream)
        except KeyboardInterrupt:
            kept = "" if run.is_empty() else f"; the samples that were complete are in {run.path}"
            raise CommandError(f"stopped{kept}", 130) from None
    entry = table_entry(run)
    breakdowns = domains.breakdowns_of(domain)
    texts = {
        each: f"{table([entry], each)}\n\n{details(entry['after'], each, breakdowns)}" for each in ("markdown", "text")
    }
    (run.path / "table.md").write_text(f"{texts['markdown']}\n", encoding="utf-8")
    (run.path / "table.txt").write_text(f"{texts['text']}\n", encoding="utf-8")
    return texts.get(form) or table([entry], form)


if __name__ == "__main__":
    app()
