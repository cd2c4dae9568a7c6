"""``python -m train.evaluate``: what a model can do under an agent; and runs, tabled or compared.

Without a run's folder it evaluates a model, and writes a folder like a training run's. With folders it only reads them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire import adapters, domains, rewards
from groundwire.tools.errors import CommandError
from groundwire.tools.exit import exit_on_user_error, raise_keyboard_interrupt
from groundwire.tools.fast_import import fast_import
from groundwire.tools.terminal import Version, console, spinner
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.cli.resume import pin_data_dir, resolve_path
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.presets import PRESETS
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.table import FORMATS, comparison, details, table

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_REMOTE_RUNNERS = 16


@app.command()
def main(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Show these runs, of training or of evaluation, as a table", metavar="RUN_DIR"),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With two runs: question by question, with McNemar's exact test")
    ] = False,
    model: Annotated[
        str, typer.Option(help="'starter', a checkpoint's folder, or with --base-url the name of a model there")
    ] = "starter",
    base_url: Annotated[
        str | None, typer.Option(help="Any OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(help="With --base-url: the environment variable that has its key", metavar="NAME")
    ] = "OPENAI_API_KEY",
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    samples: Annotated[int, typer.Option("--samples", "-n", help="How often each question is asked", min=1)] = 1,
    tasks: Annotated[int, typer.Option(help="Validation questions, evenly spread; 0 is all of them", min=0)] = 0,
    backend: Annotated[str, typer.Option(help="Agent framework")] = "langgraph",
    agent: Annotated[
        str | None, typer.Option(help="With --backend custom: your function", metavar="MODULE:FUNCTION")
    ] = None,
    domain: Annotated[str, typer.Option(help="What is asked")] = "spider",
    data_dir: Annotated[str | None, typer.Option(help="The domain's data. Default: what is bundled")] = None,
    reward: Annotated[str | None, typer.Option(help="Name of the reward. Default: the domain's own")] = None,
    config: Annotated[
        str | None,
        typer.Option(help=f"Preset: {', '.join(PRESETS)}. Default: fast, or with --base-url hf"),
    ] = None,
    max_turns: Annotated[int | None, typer.Option(help="Queries the agent may write for one question")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens that one reply may have")] = None,
    table_info_truncate: Annotated[int | None, typer.Option(help="Characters of the schema in the prompt")] = None,
    execution_truncate: Annotated[int | None, typer.Option(help="Characters of a query's result in the prompt")] = None,
    n_runners: Annotated[
        int | None, typer.Option(help=f"Rollouts that run at once. Default with --base-url: {_REMOTE_RUNNERS}")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling")] = 0,
    output_dir: Annotated[str, typer.Option(help="Where folders of evaluations are made")] = "evaluations",
    form: Annotated[str, typer.Option("--format", help=f"How it is printed: {', '.join(FORMATS)}")] = "text",
    version: Version = False,
) -> None:
    """Evaluate a model under an agent, or read runs: a table, or two compared question by question."""
    if form not in FORMATS:
        raise typer.BadParameter(f"--format {form}; it is one of {', '.join(FORMATS)}")
    if compare and len(runs or []) != 2:
        raise typer.BadParameter(f"--compare needs two runs, and {len(runs or [])} are given")
    given: dict[str, Any] = {
        "model": model if base_url else resolve_path(model),
        "trainer": "local",
        "backend": backend,
        "agent": agent,
        "domain": domain,
        "data_dir": resolve_path(data_dir),
        "reward": reward,
        "max_turns": max_turns,
        "max_tokens": max_tokens,
        "table_info_truncate": table_info_truncate,
        "execution_truncate": execution_truncate,
        "n_runners": _REMOTE_RUNNERS if n_runners is None and base_url else n_runners,
        "device": device,
        "seed": seed,
        "output_dir": output_dir,
        "val_temperature": temperature,
        "val_tasks": tasks,
    }
    with exit_on_user_error():
        if runs:
            with spinner("reading the runs"):
                text = _read(runs, compare=compare, form=form)
        else:
            settings = resolve(config or ("hf" if base_url else "fast"), **given)
            text = _evaluate(settings, base_url=base_url, api_key_env=api_key_env, samples=samples, form=form)
        typer.echo(text)


def _read(paths: list[str], *, compare: bool, form: str) -> str:
    from groundwire.train.evaluation.metrics import compare as compared
    from groundwire.train.evaluation.run_reader import entry, final_rows

    runs = [RunDir.open(path) for path in paths]
    if not compare:
        return table([entry(run) for run in runs], form)
    try:
        result = compared(*(final_rows(run) for run in runs))
    except ValueError as error:
        raise RunDirError(f"{paths[0]} and {paths[1]} cannot be compared: {error}") from error
    return comparison(result, [run.path.name for run in runs], form)


def _evaluate(settings: RunConfig, *, base_url: str | None, api_key_env: str, samples: int, form: str) -> str:
    with spinner("starting"), fast_import():
        from groundwire.tools.log_setup import setup_logging
        from groundwire.train.cli.progress import Display
        from groundwire.train.evaluation.evaluator import evaluate
        from groundwire.train.evaluation.probe_endpoint import probe_endpoint
        from groundwire.train.evaluation.run_reader import entry
        from groundwire.train.rollouts.runtime import Upstream

    adapters.check(settings.backend)
    domain = domains.get(settings.domain)
    rewards.check(settings.reward or domain.default_reward)
    data = domain.load(settings.data_dir)
    settings = pin_data_dir(settings, data, None)
    if not data.validation:
        raise ConfigError(f"{data.source}: there are no validation tasks")
    if base_url is None and settings.model != "starter" and not (Path(settings.model) / "config.json").is_file():
        raise ConfigError(
            f"no model in {settings.model}: it has no config.json. Give 'starter', a folder saved by transformers, or "
            "--base-url with the name of a model there"
        )
    setup_logging()
    signal.signal(signal.SIGTERM, raise_keyboard_interrupt)
    upstream = None
    if base_url is not None:
        sampling = {"temperature": settings.val_temperature, "max_tokens": settings.max_tokens, "seed": settings.seed}
        api_key = os.environ.get(api_key_env)
        probe = probe_endpoint(base_url, model=settings.model, api_key=api_key, sampling=sampling)
        upstream = Upstream(base_url=base_url.rstrip("/"), model=settings.model, api_key=api_key, ids=probe.accepts_ids)
    stored = settings.to_dict() | {"steps": 0, "evaluation": {"samples": samples, "base_url": base_url}}
    run = RunDir.create(settings.output_dir, backend=settings.backend, domain=settings.domain, config=stored)
    shown = console(stderr=True)
    shown.print(f"data: {data.source}", markup=False)
    shown.print(f"run:  {run.path}", markup=False)
    with run.lock(), Display(shown, 0) as display:
        try:
            figures = evaluate(
                settings, data=data, domain=domain, run=run, watcher=display, samples=samples, upstream=upstream
            )
        except KeyboardInterrupt:
            kept = "" if run.is_empty() else f"; the samples that were complete are in {run.path}"
            raise CommandError(f"stopped{kept}", 130) from None
    line = entry(run)
    for each, name in (("markdown", "table.md"), ("text", "table.txt")):
        (run.path / name).write_text(f"{table([line], each)}\n\n{details(figures, each)}\n", encoding="utf-8")
    if form == "json":
        return table([line], form)
    return f"{table([line], form)}\n\n{details(figures, form)}"


if __name__ == "__main__":
    app()
