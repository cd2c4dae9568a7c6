"""An evaluation from its settings to its metrics, for ``groundwire evaluate`` and the function ``evaluate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from groundwire.tools.errors import CommandError, check_trainer
from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import spinner
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve, with_file
from groundwire.train.config.run_config import RunConfig
from groundwire.train.job.prepare import Job, Objects, prepare, resolve_domain, resolve_path
from groundwire.train.job.trained_model import with_settings_of_run
from groundwire.train.policy.pretrained.locate import find_model

if TYPE_CHECKING:
    from rich.console import Console

    from groundwire.train.rollouts.runtime import Upstream

__all__ = ["DEFAULTS", "Endpoint", "evaluation_settings", "make_evaluation_job", "run_evaluation", "upstream_of"]

DEFAULTS: dict[str, Any] = {"val_tasks": 0, "val_temperature": 0.0, "output_dir": "evaluations", "track": []}
"""The settings whose defaults differ from those of a training run."""
_REMOTE_RUNNERS = 16


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint that has the model."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)


def make_evaluation_job(
    given: Mapping[str, Any],
    endpoint: Endpoint | None = None,
    *,
    split: str | None = None,
    objects: Objects | None = None,
) -> Job:
    """Check the ``given`` settings of an evaluation, and load the data; ``split`` is the part with the questions.

    Raises errors derived from :class:`groundwire.tools.errors.UserError`.
    """
    check_trainer()
    objects = objects or Objects()
    config = evaluation_settings(given, endpoint, objects=objects.names())
    job = prepare(config, split=split, own_model=endpoint is None, objects=objects)
    if endpoint is None:
        find_model(config.model)  # a run with verl may have trained what cannot be sampled here
    if not job.data.validation:
        raise ConfigError(f"{job.data.source}: there are no validation tasks")
    return job


def evaluation_settings(
    given: Mapping[str, Any], endpoint: Endpoint | None = None, *, objects: Mapping[str, str] | None = None
) -> RunConfig:
    """The settings of an evaluation; an endpoint has other defaults than a model that is served here.

    A model that a run trained has the settings of its run. ``objects`` are the parts that are given as objects.
    """
    remote = {"n_runners": _REMOTE_RUNNERS} if endpoint else {}
    given = with_file(dict(given))
    given = given if endpoint else with_settings_of_run(given, objects=objects or {})
    given = {**DEFAULTS, **remote, "trainer": "local", **given}
    paths = ("data_dir",) if endpoint else ("model", "data_dir")
    given |= {name: resolve_path(given[name]) for name in paths if name in given}
    if "domain" in given:
        given["domain"] = resolve_domain(given["domain"])
    return resolve(given.pop("config", None) or ("hf" if endpoint else "fast"), **given)


def run_evaluation(
    job: Job, endpoint: Endpoint | None, *, samples: int, shown: Console, split: str | None = None
) -> tuple[RunDir, dict[str, Any]]:
    """Evaluate, show the progress on ``shown``, and return the evaluation's directory and its row of the table.

    Raises errors derived from :class:`groundwire.tools.errors.UserError`; an interrupt is one with exit code 130.
    """
    evaluate = _import_evaluator()
    from groundwire.train.cli.progress import ProgressDisplay
    from groundwire.train.evaluation.run_reader import table_entry

    config, upstream = job.config, upstream_of(endpoint, job.config)
    about = {"samples": samples, "base_url": endpoint and endpoint.base_url, "split": split}
    stored = config.to_dict() | {"steps": 0, "evaluation": about}
    run = RunDir.create(config.output_dir, backend=config.backend, domain=job.domain.name, config=stored)
    for note in job.notes:
        shown.print(note, markup=False)
    shown.print(f"run:  {run.path}", markup=False)
    with run.lock(), ProgressDisplay(shown, 0) as display:
        try:
            evaluate(
                config,
                data=job.data,
                domain=job.domain,
                backend=job.backend,
                reward=job.reward,
                run=run,
                callback=display,
                samples=samples,
                upstream=upstream,
            )
        except KeyboardInterrupt:
            kept = "" if run.is_empty() else f"; the samples that were complete are in {run.path}"
            raise CommandError(f"stopped{kept}", 130) from None
        finally:
            if warning := job.databases.warning():
                print(f"warning: {warning}", file=sys.stderr)
    return run, table_entry(run, job.domain)


def upstream_of(endpoint: Endpoint | None, config: RunConfig) -> Upstream | None:
    """The policy at an endpoint, which is asked first what it accepts; None without one.

    Raises :class:`groundwire.train.evaluation.probe_endpoint.EndpointUnusableError`.
    """
    if endpoint is None:
        return None
    from groundwire.train.evaluation.probe_endpoint import probe_endpoint
    from groundwire.train.rollouts.runtime import Upstream

    url, key = endpoint.base_url, endpoint.api_key
    sampling = {"temperature": config.val_temperature, "max_tokens": config.max_tokens, "seed": config.seed}
    probe = probe_endpoint(url, model=config.model, api_key=key, sampling=sampling)
    return Upstream(base_url=url.rstrip("/"), model=config.model, api_key=key, ids=probe.accepts_ids)


@cache
def _import_evaluator() -> Callable[..., Any]:
    """The evaluator's function. It is imported once with the garbage collector off."""
    with spinner("starting"), fast_import():
        from groundwire.train.evaluation.evaluator import evaluate
    return evaluate
