"""Rollouts without training: an evaluation, for ``groundwire evaluate`` and the function ``evaluate``, and
``groundwire run --dev``, which runs a few tasks to be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire.tools.errors import check_layer
from groundwire.tools.files import TemporaryFolder
from groundwire.tools.secrets import say
from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import show_line, spinner
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve, with_file
from groundwire.train.config.run_config import RunConfig
from groundwire.train.job.job import NO_OBJECTS, Job, ModelEndpoint, Objects
from groundwire.train.job.prepare import check_store_settings, prepare, with_resolved_paths
from groundwire.train.job.trained_model import with_settings_of_run
from groundwire.train.job.trainer import trainer_of
from groundwire.train.policy.pretrained.locate import NAMES, find_model

if TYPE_CHECKING:
    from rich.console import Console

    from groundwire.train.evaluation.verdict import AgentVerdict
    from groundwire.train.store.rollout import Rollout

DEFAULTS: dict[str, Any] = {"val_tasks": 0, "val_temperature": 0.0, "output_dir": "evaluations", "track": []}
"""The settings whose defaults differ from those of a training run."""
_REMOTE_RUNNERS = 16
_DEV_TASKS = 10
_DEV_SAMPLES = 4
"""Answers to each of them as in training."""
_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE")


def make_evaluation_job(
    given: Mapping[str, Any],
    endpoint: ModelEndpoint | None = None,
    *,
    split: str | None = None,
    objects: Objects = NO_OBJECTS,
) -> Job:
    """Check the ``given`` settings of an evaluation, and load the data; ``split`` is the part with the questions."""
    check_layer("torch")
    config = evaluation_settings(given, endpoint, objects=objects.names())
    job = prepare(config, split=split, endpoint=endpoint, objects=objects)
    if endpoint is None:
        find_model(config.model)  # a run with verl may have trained what cannot be sampled here
    if not job.data.validation:
        raise ConfigError(f"{job.data.source}: there are no validation tasks")
    return job


def evaluation_settings(
    given: Mapping[str, Any], endpoint: ModelEndpoint | None = None, *, objects: Collection[str] = ()
) -> RunConfig:
    """The settings of an evaluation; an endpoint has other defaults than a model that is served here.

    A model that a run trained has the settings of its run. ``objects`` are the parts that are given as objects.
    """
    defaults, given = {**DEFAULTS, "trainer": "local"}, with_file(dict(given))
    if endpoint:
        given = with_resolved_paths({**defaults, "n_runners": _REMOTE_RUNNERS, **given}, "data_dir")
    else:
        given = with_resolved_paths({**defaults, **with_settings_of_run(given, objects=objects)}, "model", "data_dir")
    return resolve(given.pop("config", None) or ("hf" if endpoint else "fast"), **given)


def run_evaluation(
    job: Job, *, samples: int, output: Console, split: str | None = None
) -> tuple[RunDir, dict[str, Any]]:
    """Evaluate, show the progress on ``output``, and return the evaluation's directory and its row of the table."""
    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import ProgressDisplay
        from groundwire.train.evaluation import evaluator
    from groundwire.train.evaluation.run_reader import table_entry

    if samples < 2 and job.view.compares:
        raise ConfigError("the reward ranks the answers to a task, and one sample has one: give --samples 2 or more")
    config, upstream = job.config, evaluator.upstream_of(job)
    evaluation = {"samples": samples, "base_url": job.endpoint and job.endpoint.base_url, "split": split}
    stored = config.to_dict() | {"steps": 0, "evaluation": evaluation}
    stored |= {"objects": names} if (names := job.objects.names()) else {}
    run = RunDir.create(config.output_dir, backend=config.backend, domain=job.domain.name, config=stored)
    for note in job.notes:
        show_line(output, note)
    show_line(output, f"run:  {run.path}")
    with run.lock(), ProgressDisplay(output, 0) as display:
        try:
            evaluator.evaluate(job, run=run, callback=display, samples=samples, upstream=upstream)
        except KeyboardInterrupt:
            kept = "" if run.is_empty() else f"; the samples that were complete are in {run.path}"
            raise KeyboardInterrupt(f"stopped{kept}") from None
        finally:
            if warning := job.warning():
                say(f"warning: {warning}", err=True)
    return run, table_entry(run, job.domain)


def find_endpoint(base_url: str | None, given: Mapping[str, Any]) -> ModelEndpoint | None:
    """The endpoint at ``base_url``, else at the URL in the environment if the ``given`` model is no local one."""
    model = given.get("model")
    elsewhere = not trainer_of(given.get("trainer") or "local").in_process
    if base_url is None and (elsewhere or (model and model not in NAMES and not Path(model).exists())):
        base_url = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), None)
    return ModelEndpoint(base_url, os.environ.get("OPENAI_API_KEY")) if base_url else None


def check_endpoint(job: Job, *, dev: bool = True) -> None:
    """Raise :class:`ConfigError` if the job's model is neither here nor at an endpoint, or it trains its own."""
    if not dev and not job.trainer.takes_endpoint:
        raise ConfigError(
            "--base-url needs --dev or --trainer gepa: training updates a model of its own (or use groundwire evaluate)"
        )
    if job.endpoint is None and not job.trainer.in_process:
        raise ConfigError(
            f"--dev with --trainer {job.config.trainer} starts no model: give an endpoint that has one with --base-url "
            f"URL --model NAME, or its URL in {' or '.join(_VARIABLES)}"
        )
    if job.endpoint is not None and job.config.model in NAMES:
        raise ConfigError(f"the endpoint {job.endpoint.base_url} needs the name of its model: --model NAME")


def run_dev(job: Job, output: Console, *, details: bool = True) -> tuple[list[Rollout], AgentVerdict]:
    """Run ten tasks without training, with the run's own model or at its endpoint, and return them with a verdict.

    With ``details`` it prints each as it ends, and the verdict.
    """
    check_store_settings(job.config.external_store_address, job.config.token_file)
    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import ProgressDisplay, show_rollout, verdict_lines
        from groundwire.train.evaluation import evaluator

    if job.endpoint is not None:  # the run's runners may be elsewhere, or verl's
        config = job.config
        here = {"runner_processes": int(bool(config.runner_python)), "n_runners": config.n_runners or _DEV_TASKS}
        job = replace(job, config=config.model_copy(update=here))
    with TemporaryFolder("groundwire-look-") as folder, ProgressDisplay(output, 0) as display:
        show = partial(show_rollout, output, agent_match=job.config.agent_match, trained=job.endpoint is None)
        shown = {"show": show} if details else {}
        run = RunDir(folder)
        ended, verdict = evaluator.try_tasks(
            job, run=run, callback=display, count=_DEV_TASKS, samples=_DEV_SAMPLES, **shown
        )
    if details:
        output.rule()
        for line in verdict_lines(ended, verdict):
            show_line(output, line)
    return ended, verdict
