"""A training run from its settings to its summary, for the command ``run`` and the function ``fit``.

Heavy packages are imported after the settings are checked.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire import rewards
from groundwire.domains.text_to_sql.golds import with_gold_trust
from groundwire.rewards.attack import code_hash, load_attack
from groundwire.rewards.attack.watch import FILE, KnownAttacks
from groundwire.tools.errors import CommandError, check_layer, machine_error
from groundwire.tools.machine import processors
from groundwire.tools.secrets import say
from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import show_line, spinner
from groundwire.train.api.resume import check_continuation, config_for_resume, parts_of, resume_hint, store_settings
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.artifacts.tracking import logged_in
from groundwire.train.config.resolve import differences, resolve, with_file
from groundwire.train.config.run_config import SQL_AGENTS, RunConfig
from groundwire.train.config.verl_names import LOGGER
from groundwire.train.evaluation.run_reader import summarize
from groundwire.train.job.graceful_shutdown import GracefulShutdown
from groundwire.train.job.job import NO_OBJECTS, Job, ModelEndpoint, Objects
from groundwire.train.job.prepare import check_store_settings, prepare, relative_path, with_resolved_paths
from groundwire.train.job.trainer import default_trainer, trainer_of
from groundwire.train.rollouts.factory import runs_elsewhere

if TYPE_CHECKING:
    from rich.console import Console

_STARTER_NOTES = {
    "sql": "The starter is a toy policy that stopped learning early on purpose, so that reinforcement learning has "
    "room. It was made for English questions, SQL, and prompts of up to 2,000 tokens. The bundled validation databases "
    "are new to it but generated; on real Spider it scores near zero.",
    "prose": "The starter is a toy policy that knows nothing but SQL over other databases: it writes no prose, and its "
    "reward says nothing of a real model's. This run shows that everything works; give --model a model that can write.",
}
"""What a reader of the starter's results needs to know, by the form of the domain's answers."""

_MANY_ROLLOUTS = 64
"""Of a step, from which on a process for the agents is worth its start."""
_VARIANTS = (
    "reward: in training a query must also be right on variants of its database; validation counts the database alone"
)


def make_job(
    given: Mapping[str, Any],
    *,
    resumed: RunDir | None = None,
    objects: Objects = NO_OBJECTS,
    dev: bool = False,
    endpoint: ModelEndpoint | None = None,
) -> Job:
    """Check the ``given`` settings, which a file, a preset or the ``resumed`` run completes, and load the data.

    The model is at the ``endpoint``, if there is one.
    """
    check_layer("torch")
    given = with_resolved_paths(with_file(dict(given)), "model", "data_dir", "gold_trust", "token_file")
    if resumed is None:
        config = _config(given, objects, dev=dev, endpoint=endpoint)
    else:
        config = config_for_resume(resumed, given, objects=objects.names())
    if not dev:
        config = _with_runner_processes(config, objects)
    job = prepare(config, endpoint=endpoint, objects=objects)
    if config.gold_trust is not None:
        data, note = with_gold_trust(job.data, Path(config.gold_trust), seed=config.seed)
        job = replace(job, data=data, notes=[*job.notes, f"gold trust: {note}"])
    for split, tasks in (("training", job.data.train), ("validation", job.data.validation)):
        if not tasks:
            raise CommandError(f"{job.data.source}: no {split} tasks are left; the run needs some of both")
    if rewards.has_variants(job.reward):
        job.notes.append(_VARIANTS)
    if job.view.compares and config.steps:
        requests = 2 * config.judge.samples * config.steps * config.most_groups
        job.notes.append(f"reward: at most {requests:,} requests to the judge in {config.steps} steps, and validations")
    return job if resumed is None else check_continuation(resumed, job)


def _with_runner_processes(config: RunConfig, objects: Objects) -> RunConfig:
    """With a chosen number of processes for agents. A bundled agent in the trainer's process slows the sampling, which
    waits for the interpreter lock after each of torch's operations (docs/benchmarks.md has figures)."""
    trainer = trainer_of(config.trainer)
    here = trainer.in_process and trainer.updates_model and config.external_store_address is None
    bundled = config.backend in SQL_AGENTS and config.agent is None and not objects.names()
    many = config.tasks_per_step * config.group_size >= _MANY_ROLLOUTS and processors() > 1
    if config.runner_processes is not None or not (here and bundled and many):
        return config
    return config.model_copy(update={"runner_processes": 1})


def _config(given: dict[str, Any], objects: Objects, *, dev: bool, endpoint: ModelEndpoint | None) -> RunConfig:
    """The settings of a new run."""
    if endpoint is not None and trainer_of(given.get("trainer") or "local").in_process:
        given.setdefault("config", "hf")  # not the starter's preset
    local = dev or bool(objects.names())
    given.setdefault("trainer", default_trainer(given.get("config"), device=given.get("device"), dev=local))
    config = resolve(given.pop("config", None) or "fast", **given)
    if given.get("track") is not None or LOGGER in (given.get("verl") or {}):
        return config
    # A preset's trackers are used if somebody is logged in; one that was given is checked later.
    return config.model_copy(update={"track": [name for name in config.track if logged_in(name)]})


def train(job: Job, resumed: RunDir | None, output: Console, *, watch: bool = False) -> RunDir:
    """Train, show the progress and the summary on ``output``, and return the run, which has all results.

    With ``watch`` its report is served meanwhile.

    A resumed run without a step left is returned as it is. An error that ends training says how to continue.
    """
    config, trainer = job.config, job.trainer
    if resumed is not None and (message := trainer.nothing_left(config, resumed)):
        if not resumed.has_final_files():  # killed after its last step
            with resumed.lock():
                _conclude(job, resumed)
        show_line(output, message)
        return resumed
    check_store_settings(config.external_store_address, config.token_file)
    trainer.check(job)  # before the run directory is made
    run = resumed or RunDir.create(
        config.output_dir, backend=config.backend, domain=job.domain.name, config=_stored_config(job)
    )
    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import ProgressDisplay, show_summary
        from groundwire.train.report.live import served
    with run.lock():
        if resumed is not None:
            store_settings(run, job)
        show_line(output, f"run:  {run.path}")
        if line := _watch(job, run):
            show_line(output, line)
        with (
            served(run) if watch else nullcontext() as address,
            resume_hint(run, fit=bool(job.objects.names())),
            GracefulShutdown() as shutdown,
        ):
            if address:
                show_line(output, f"report: {address}")
            try:
                with ProgressDisplay(output, trainer.steps_shown(config)) as display:
                    trainer.train(job, run, display, shutdown)
            except BaseException:
                with shutdown.critical_section("writing the summary"):
                    try:
                        _conclude(job, run)
                    except Exception as error:  # the first error is the one to report
                        say(f"warning: the summary was not written: {machine_error(error) or error}", err=True)
                raise
            with shutdown.critical_section("writing the summary"):
                summary = _conclude(job, run)
    if text := trainer.result(run):
        show_line(output, text)
    show_summary(output, summary, relative_path(run.path), job.domain)
    return run


def _watch(job: Job, run: RunDir) -> str:
    """Give the run what the attack on its reward has found. Returns a line about it, or how to attack the reward."""
    config, tasks = job.config, job.data.train
    (run.path / FILE).unlink(missing_ok=True)
    name = job.objects.names().get("reward") or config.reward or job.domain.default_reward
    if runs_elsewhere(name or "", config) or not name:
        return ""
    result = load_attack(code_hash(name, job.reward, [*tasks, *job.data.validation]))
    if result is None:
        chosen = {"--tasks": config.domain, "--reward": name, "--judge-model": config.judge.model}
        options = [text for option in chosen.items() if option[1] for text in option]
        command = shlex.join(["groundwire", "audit", "--attack", *map(str, options)])
        return f"reward: never attacked; {command} looks for wrong answers that it pays" if ":" in name else ""
    golds = list(map(job.view.gold_value, tasks))
    with spinner("rendering the known attacks on the reward"):
        known = asyncio.run(
            KnownAttacks.of(result, tasks, job.reward, golds=golds, answers=job.view.answers, zero=config.zero_attacks)
        )
    if known is None:
        return ""
    run.write_json(FILE, asdict(known))
    then = "score the least reward" if known.zero else "are counted; zero_attacks=true takes their reward"
    return f"reward: pays known attacks ({'; '.join(known.names[:3])}); rollouts that win with one {then}"


def format_config(job: Job, run_dir: str, *, diff: bool = False) -> str:
    """Every setting, as the trainer writes them; with ``diff`` what differs from the published recipe."""
    if diff:
        lines = differences(job.config, job.trainer.own_settings(job.config))
        return "\n".join(lines) or "no setting differs from the published recipe"
    return job.trainer.describe(job, run_dir)


def _stored_config(job: Job) -> dict[str, Any]:
    objects, base_url = job.objects.names(), job.endpoint and job.endpoint.base_url
    others = {name: value for name, value in (("objects", objects), ("base_url", base_url)) if value}
    return {**job.config.to_dict(), "parts": parts_of(job), **others}


def _conclude(job: Job, run: RunDir) -> dict[str, Any]:
    """Write the summary, the curve and all rollouts of a run that ended in any way; returns the summary."""
    from groundwire.train.evaluation.run_reader import paired_changes, settings_changes
    from groundwire.train.report.charts import draw_curve

    job.trainer.collect(run)
    if warning := job.warning():
        say(f"warning: {warning}", err=True)
    if not (metrics := run.metrics()):
        return {}
    note = _STARTER_NOTES[job.view.answers.name] if job.config.model == "starter" else ""
    summary = summarize(run, job.config, job.data.source, note=note)
    with suppress(RunDirError):  # a validation cannot be read: the means in the metrics remain
        for name, change in paired_changes(run).items():
            summary[name] |= change if "after" in summary[name] else {}
    if warning:
        summary["warning"] = warning
    summary["resumed"] = settings_changes(run)
    run.write_json("summary.json", summary)
    with spinner("writing rollouts.parquet and the curve"):
        damaged = run.merge_rollouts()
        draw_curve(metrics, run.path / "curve.png")
    for file in damaged:
        say(f"warning: {file}, and is left out", err=True)
    return summary
