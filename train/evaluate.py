"""``groundwire evaluate``: evaluate a model under an agent, or tabulate and compare runs.

Without a run directory it evaluates a model and writes a run directory, as training does. With run directories it only
reads them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.startup import read_env_file, setup_logging
from groundwire.tools.terminal import Version, console, spinner
from groundwire.train.api.evaluation import DEFAULTS, make_evaluation_job, run_evaluation
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.cli.options import SettingsCommand, given_settings, takes_settings
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.evaluation.table import changes, comparison, details, speed_table, table
from groundwire.train.job.job import ModelEndpoint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_OPTIONS = {
    **{name: name for name in AgentSettings.model_fields if name != "judge"},
    **{
        name: name
        for name in ("config", "model", "data_dir", "output_dir", "device", "seed", "prompts", "otlp", "n_runners")
    },
    **{name: name for name in ("runner_processes", "runner_python", "max_tokens", "max_model_len", "retries")},
    "val_temperature": "temperature",
    "val_tasks": "tasks",
}
"""The settings of an evaluation, and the names of their options."""


@app.command(cls=SettingsCommand)
@takes_settings(_OPTIONS, **DEFAULTS, config="fast, with --base-url hf")
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
    split: Annotated[
        str | None,
        typer.Option(help="Part of the data with the questions: train, or a domain's own such as test_dev_500 or test"),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Rollouts per question", min=1)] = 1,
    form: Annotated[
        Literal["text", "markdown", "json"], typer.Option("--format", help="Format of the output")
    ] = "text",
    version: Version = False,
) -> None:
    """Evaluate a model under an agent, or read runs: a table, or two compared question by question."""
    pairs = [text for text in runs or [] if "=" in text and not Path(text).exists()]
    folders = [text for text in runs or [] if text not in pairs]
    if compare and len(folders) != 2:
        raise typer.BadParameter(f"--compare needs two runs, and {len(folders)} are given")
    with exit_on_user_error():
        read_env_file()
        if folders:
            with spinner("reading the runs"):
                text = _show_runs(folders, compare=compare, form=form)
        else:
            given = given_settings(settings, pairs, names=_OPTIONS)
            endpoint = ModelEndpoint(base_url, os.environ.get(api_key_env)) if base_url else None
            text = _evaluate(given, endpoint, split=split, samples=samples, form=form)
        typer.echo(text)


def _show_runs(paths: list[str], *, compare: bool, form: str) -> str:
    from groundwire.train.evaluation.metrics import compare as compared
    from groundwire.train.evaluation.metrics import scores_by_question
    from groundwire.train.evaluation.run_reader import final_rollouts, table_entry

    runs = [RunDir.open(path) for path in paths]
    if not compare:
        entries = [table_entry(run) for run in runs]
        parts = [table(entries, form)]
        parts += [] if form == "json" else [speed_table(entries, form), changes(entries, form)]
        return "\n\n".join(filter(None, parts))
    try:
        result = compared(*(scores_by_question(final_rollouts(run)) for run in runs))
    except ValueError as error:
        raise RunDirError(f"{paths[0]} and {paths[1]} cannot be compared: {error}") from error
    return comparison(result, [run.path.name for run in runs], form)


def _evaluate(
    given: dict[str, Any], endpoint: ModelEndpoint | None, *, split: str | None, samples: int, form: str
) -> str:
    job = make_evaluation_job(given, endpoint, split=split)
    setup_logging()
    run, entry = run_evaluation(job, split=split, samples=samples, shown=console(stderr=True))
    breakdowns = job.domain.breakdowns
    texts = {
        name: f"{table([entry], name)}\n\n{details(entry['after'], name, breakdowns)}" for name in ("markdown", "text")
    }
    (run.path / "table.md").write_text(f"{texts['markdown']}\n", encoding="utf-8")
    (run.path / "table.txt").write_text(f"{texts['text']}\n", encoding="utf-8")
    return texts.get(form) or table([entry], form)


if __name__ == "__main__":
    app()
