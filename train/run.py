"""``python -m train.run``: train the model behind an agent.

Everything heavy is imported once the arguments are known to be right, so ``--help`` and a wrong name answer at once.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groundwire import adapters, domains, rewards
from groundwire.rewards.judge.settings import parse_settings
from groundwire.tools.errors import CommandError
from groundwire.tools.exit import exit_on_user_error, raise_keyboard_interrupt
from groundwire.tools.fast_import import fast_import
from groundwire.tools.log_setup import setup_logging
from groundwire.tools.terminal import Version, console, spinner
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.artifacts.summary import summarize
from groundwire.train.artifacts.tracking import check_trackers, parse_track
from groundwire.train.cli.resume import config_for_resume, finished, pin_data_dir, resolve_path, save_step_count
from groundwire.train.cli.trainer_choice import default_trainer, resolved
from groundwire.train.config.overrides import by_name, parse_overrides
from groundwire.train.config.presets import PRESETS
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import TRACKERS, RunConfig
from groundwire.train.config.verl_presets import VERL_PRESETS
from groundwire.train.rollouts.errors import EventLoopError, RolloutsFailedError
from groundwire.train.rollouts.factory import make_backend
from groundwire.train.store.health import check_store

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@app.command()
def main(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="A setting without an option, e.g. learning_rate=1e-5; with verl any of its own, too",
            metavar="KEY=VALUE",
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Agent framework: langgraph, openai-agents, mcp, custom. Default: langgraph")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="With --backend custom: your function", metavar="MODULE:FUNCTION")
    ] = None,
    domain: Annotated[str | None, typer.Option(help="What is asked. Default: spider")] = None,
    model: Annotated[
        str | None, typer.Option(help="'starter' (ships with the project), or a folder in Hugging Face's format")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            help="local (in this process), or verl (on GPUs). Default: verl where CUDA and verl are, else local"
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help=f"Preset: {', '.join(PRESETS)} (local), {', '.join(VERL_PRESETS)} (verl). Default: fast",
        ),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Name of the reward, or a sum: 0.9*a+0.1*b. Default: the domain's own")
    ] = None,
    judge_model: Annotated[
        str | None,
        typer.Option(help="For rewards with a judge: its model, as LiteLLM or the endpoint names it. Default: none"),
    ] = None,
    judge_base_url: Annotated[
        str | None, typer.Option(help="Where the judge's model is: any OpenAI-compatible endpoint", metavar="URL")
    ] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(help="A setting of the judge, e.g. samples=3; see docs/rewards.md", metavar="NAME=VALUE"),
    ] = None,
    track: Annotated[
        str | None, typer.Option(help=f"Send the figures of each step to {', '.join(TRACKERS)}", metavar="NAME,NAME")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps")] = None,
    ci_fast: Annotated[bool, typer.Option("--ci-fast", help="One step, a few validation questions")] = False,
    ci: Annotated[bool, typer.Option("--ci", help="20 steps")] = False,
    dev: Annotated[
        bool, typer.Option("--dev", help="No training: run ten tasks and print every call and triplet")
    ] = False,
    n_runners: Annotated[int | None, typer.Option(help="Rollouts that run at once")] = None,
    agent_match: Annotated[
        str | None,
        typer.Option("--agent-match", "--active-agent", help="Train only agents whose name matches this regex"),
    ] = None,
    credit: Annotated[
        str | None,
        typer.Option(help="With verl: whose a rollout's reward is, all its calls' (broadcast), the last's, discount"),
    ] = None,
    max_turns: Annotated[int | None, typer.Option(help="Queries the agent may write for one question")] = None,
    table_info_truncate: Annotated[int | None, typer.Option(help="Characters of the schema in the prompt")] = None,
    execution_truncate: Annotated[int | None, typer.Option(help="Characters of a query's result in the prompt")] = None,
    val_temperature: Annotated[
        float | None,
        typer.Option(
            help="Temperature in validation; 0 is greedy, with a sampled one beside it before and after training"
        ),
    ] = None,
    val_tasks: Annotated[
        int | None, typer.Option(help="Validation questions before and after training; 0 is all of them")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="The domain's data. Default: what is bundled")] = None,
    output_dir: Annotated[str | None, typer.Option(help="Where run folders are made. Default: runs")] = None,
    external_store_address: Annotated[
        str | None, typer.Option(help="Train through a store in another process", metavar="http://HOST:PORT")
    ] = None,
    llm_proxy: Annotated[
        bool,
        typer.Option(
            "--llm-proxy",
            help="Accepted and without effect: LLM calls always go through the proxy",
        ),
    ] = False,
    proxy_host: Annotated[
        str | None,
        typer.Option(help="Address of this machine at which runners on other machines reach the LLM proxy"),
    ] = None,
    proxy_port: Annotated[
        int | None, typer.Option(help="Port of the LLM proxy. Default: 0, any free port", min=0, max=65535)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling and of the order of tasks. Default: 0")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with the run in this folder, e.g. runs/latest", metavar="RUN_DIR")
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show every setting, and stop")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log everything, and show tracebacks")] = False,
    version: Version = False,
) -> None:
    """Train the model behind an agent with GRPO, on this machine."""
    if sum((ci_fast, ci, dev)) > 1:
        raise typer.BadParameter("--ci-fast, --ci and --dev exclude each other")
    given: dict[str, Any] = {
        "backend": backend,
        "agent": agent,
        "domain": domain,
        "trainer": trainer,
        "model": resolve_path(model),
        "reward": reward,
        "steps": steps if steps is not None else 1 if ci_fast else 20 if ci else None,
        "n_runners": n_runners,
        "agent_match": agent_match,
        "credit": credit,
        "max_turns": max_turns,
        "table_info_truncate": table_info_truncate,
        "execution_truncate": execution_truncate,
        "val_temperature": val_temperature,
        "val_tasks": 32 if ci_fast and val_tasks is None else val_tasks,
        "data_dir": resolve_path(data_dir),
        "output_dir": output_dir,
        "external_store_address": external_store_address,
        "llm_proxy": llm_proxy or None,
        "proxy_host": proxy_host,
        "proxy_port": proxy_port,
        "device": device,
        "seed": seed,
    }
    with exit_on_user_error(debug):
        given["track"] = parse_track(track)
        given["judge"] = parse_settings(judge or [], model=judge_model, base_url=judge_base_url)
        given |= by_name(parse_overrides(overrides or []), options=[*given, "config"])
        _run(config, given, resume=resume, dev=dev, debug=debug, print_config=print_config)


def _run(
    preset: str | None, given: dict[str, Any], *, resume: str | None, dev: bool, debug: bool, print_config: bool
) -> None:
    shown = console()
    note = console(stderr=print_config)  # what --print-config prints is read by programs, too
    run = RunDir.open(resume) if resume else None
    if run is None and given["trainer"] is None:
        given["trainer"] = default_trainer(preset, device=given["device"], dev=dev)
    settings = config_for_resume(run, preset, given) if run else resolve(preset or "fast", **given)
    check_trackers(settings.track)
    _check_store(settings.external_store_address)
    adapters.check(settings.backend)
    domain = domains.get(settings.domain)
    told = _check_reward(settings, domain)
    data = domain.load(settings.data_dir)
    settings = pin_data_dir(settings, data, run)
    note.print(f"data: {data.source}")
    for reason, count in data.left_out.items():
        note.print(f"      left out of training: {count} ({reason})")
    if not data.train or not data.validation:
        empty = "training" if not data.train else "validation"
        raise CommandError(f"{data.source}: no {empty} tasks are left; the run needs some of both")
    for sentence in told:
        note.print(f"reward: {sentence}", markup=False)
    _check_model(settings.model, settings.trainer)
    agents = make_backend(settings).agents
    if agents and not any(re.search(settings.agent_match or "", name) for name in agents):
        raise CommandError(f"--agent-match {settings.agent_match!r} matches none of its agents: {', '.join(agents)}")
    if print_config:
        shown.print(resolved(settings, data, str(run.path) if run else "RUN_DIR"), markup=False)
        return
    setup_logging(debug)
    signal.signal(signal.SIGTERM, raise_keyboard_interrupt)
    if dev:
        _dev(settings, data, domain, shown)
        return
    if run is not None and (done := _nothing_left(run, settings, data)):
        shown.print(done)
        return
    if settings.trainer == "verl":
        from groundwire.train.verl import launch

        with spinner("starting"):
            launch.check(settings, data)  # before the run's folder: nothing is left of a run that cannot be
    begun = run or RunDir.create(
        settings.output_dir, backend=settings.backend, domain=settings.domain, config=settings.to_dict()
    )
    with begun.lock():
        if run is not None:
            save_step_count(run, settings.steps)
        shown.print(f"run:  {begun.path}")
        summary = (_train_verl if settings.trainer == "verl" else _train)(settings, data, domain, begun, shown)
    from groundwire.train.cli.progress import show_summary

    show_summary(shown, summary, _relative(begun.path))


def _nothing_left(run: RunDir, settings: RunConfig, data: domains.TaskData) -> str:
    """What to say of a run that has no step left to do; empty where it has one."""
    if not finished(run, settings):
        return ""
    with run.lock():
        if settings.trainer == "local":
            with spinner("reading the newest checkpoint"), fast_import():
                from groundwire.train.policy.checkpoint import load_initial_state

                note = load_initial_state(settings, run).note
            if note:  # what can be read is older
                typer.echo(f"note: {note}", err=True)
                return ""
        if not run.has_final_files():  # it was killed after its last step
            _conclude(settings, data, run)
    return finished(run, settings)


def _train(
    settings: RunConfig, data: domains.TaskData, domain: domains.Domain, run: RunDir, shown: Console
) -> dict[str, Any]:
    with spinner("starting"), fast_import():
        from groundwire.adapters.tracing.proxy import SpansNotStoredError
        from groundwire.train.cli.progress import Display
        from groundwire.train.local.graceful_shutdown import GracefulShutdown
        from groundwire.train.local.trainer import LocalTrainer
        from groundwire.train.store.errors import StoreFailedError, StoreGoneError

    with GracefulShutdown() as shutdown:
        try:
            try:
                with Display(shown, settings.steps) as display:
                    LocalTrainer(
                        settings, data=data, domain=domain, run=run, watcher=display, shutdown=shutdown
                    ).train()
            finally:
                with shutdown.critical_section("writing the summary"):
                    summary = _conclude(settings, data, run)
        except KeyboardInterrupt:
            raise CommandError(f"stopped; {_kept(run)}", 130) from None
        except RolloutsFailedError as error:
            raise CommandError(f"{error}; {_kept(run)}. More: python -m train.why {_relative(run.path)}", 1) from error
        except EventLoopError as error:
            raise EventLoopError(f"{error}; {_kept(run)}") from error
        except (StoreGoneError, StoreFailedError, SpansNotStoredError) as error:
            raise CommandError(f"{error}; {_kept(run)}", 1) from error
    return summary


def _train_verl(
    settings: RunConfig, data: domains.TaskData, domain: domains.Domain, run: RunDir, shown: Console
) -> dict[str, Any]:
    from groundwire.train.verl import launch

    try:
        launch.train(settings, data, run)
    except KeyboardInterrupt:
        raise CommandError(f"stopped; {_kept(run)}", 130) from None
    except launch.TrainingError as error:
        raise CommandError(f"{error}; {_kept(run)}", 1) from error
    finally:
        summary = _conclude(settings, data, run)
    return summary


def _conclude(settings: RunConfig, data: domains.TaskData, run: RunDir) -> dict[str, Any]:
    """Whatever ended the run, what it has so far is put into the files that people read; its summary."""
    from groundwire.train.report.plots import draw_curve

    if settings.trainer == "verl":
        from groundwire.train.verl import launch

        launch.collect(run)
    if not (metrics := run.metrics()):
        return {}
    summary = summarize(run, settings, data.source)
    with spinner("writing rollouts.parquet and the curve"):
        damaged = run.merge_rollouts()
        draw_curve(metrics, run.path / "curve.png")
    for sentence in damaged:
        typer.echo(f"warning: {sentence}, and is left out", err=True)
    return summary


def _check_store(address: str | None) -> None:
    """``AGL_MANAGED_STORE`` is Agent Lightning's way to say whether the trainer starts a store of its own."""
    name = "AGL_MANAGED_STORE"
    said = os.environ.get(name, "").strip().lower()
    if said not in ("", *_YES, *_NO):
        raise CommandError(f"{name} is {said!r}; it is one of {', '.join((*_YES, *_NO))}")
    if said in _NO and address is None:
        raise CommandError(f"{name}={said} says that the store is somewhere else: give its --external-store-address")
    if said in _YES and address is not None:
        raise CommandError(
            f"{name}={said} asks for a store in the trainer, --external-store-address for {address}: give one"
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


def _dev(settings: RunConfig, data: domains.TaskData, domain: domains.Domain, shown: Console) -> None:
    from tempfile import TemporaryDirectory

    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import Display, show_rollouts
        from groundwire.train.local.trainer import LocalTrainer

    with TemporaryDirectory() as folder, Display(shown, 0) as display:
        trainer = LocalTrainer(settings, data=data, domain=domain, run=RunDir(Path(folder)), watcher=display)
        outcomes = trainer.dev()
    show_rollouts(shown, outcomes, settings.agent_match)


def _kept(run: RunDir) -> str:
    """What ``--resume`` will find."""
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


def _check_reward(settings: RunConfig, domain: domains.Domain) -> list[str]:
    """What a user should be told of the reward before the run; an option that it ignores is refused."""
    name = settings.reward or domain.default_reward
    told = rewards.notes(name, judge=settings.judge_settings())
    if settings.judge and not told:
        raise CommandError(
            f"a judge means nothing to reward {name!r}: leave out --judge-model, --judge-base-url and --judge"
        )
    return told


if __name__ == "__main__":
    app()
