"""``groundwire run --dev``: ten tasks without training, with the run's own model or any OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import spinner
from groundwire.train.api.evaluation import Endpoint, upstream_of
from groundwire.train.api.training import import_trainer
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.job.prepare import Job
from groundwire.train.policy.pretrained.locate import NAMES

if TYPE_CHECKING:
    from rich.console import Console

    from groundwire.train.rollouts.runtime import Upstream
    from groundwire.train.store.rollout import Rollout

__all__ = ["check_endpoint", "find_endpoint", "run_dev"]

TASKS = 10
_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE")


def find_endpoint(base_url: str | None, given: Mapping[str, Any]) -> Endpoint | None:
    """The endpoint at ``base_url``, else at the URL in the environment if the ``given`` model is no local one."""
    model = given.get("model")
    elsewhere = given.get("trainer") == "verl" or (model and model not in NAMES and not Path(model).exists())
    if base_url is None and elsewhere:
        base_url = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), None)
    return Endpoint(base_url, os.environ.get("OPENAI_API_KEY")) if base_url else None


def check_endpoint(config: RunConfig, endpoint: Endpoint | None, *, dev: bool = True) -> None:
    """Raise :class:`ConfigError` if the run's model is neither here nor at an ``endpoint``, or it trains its own."""
    if not dev and config.trainer != "gepa":
        raise ConfigError(
            "--base-url needs --dev or --trainer gepa: training updates a model of its own (or use groundwire evaluate)"
        )
    if endpoint is None and config.trainer == "verl":
        raise ConfigError(
            "--dev with --trainer verl starts no model: give an endpoint that has one with --base-url URL --model "
            f"NAME, or its URL in {' or '.join(_VARIABLES)}"
        )
    if endpoint is not None and config.model in NAMES:
        raise ConfigError(f"the endpoint {endpoint.base_url} needs the name of its model: --model NAME")


def run_dev(job: Job, endpoint: Endpoint | None, shown: Console) -> list[Rollout]:
    """Run :data:`TASKS` tasks; returns the rollouts with every call."""
    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import ProgressDisplay

    with TemporaryDirectory() as folder, ProgressDisplay(shown, 0) as display:
        parts: dict[str, Any] = {"domain": job.domain, "backend": job.backend, "reward": job.reward}
        run = RunDir(Path(folder))
        upstream = upstream_of(endpoint, job.config)
        if upstream is None:
            return import_trainer()(job.config, data=job.data, run=run, callback=display, **parts).dev(TASKS)
        return _run_at(upstream, job, run, display, parts)


def _run_at(upstream: Upstream, job: Job, run: RunDir, display: Any, parts: dict[str, Any]) -> list[Rollout]:
    from groundwire.tools.step_timer import StepTimer
    from groundwire.train.evaluation.validation import choose_tasks
    from groundwire.train.rollouts.runtime import RolloutRuntime
    from groundwire.train.store.rollout import Rollout

    processes = 1 if job.config.runner_python else 0
    config = job.config.model_copy(update={"runner_processes": processes, "n_runners": job.config.n_runners or TASKS})
    sampling = {"temperature": config.val_temperature, "max_tokens": config.max_tokens}
    requests = [
        Rollout(task=task, group=str(task["id"]), mode="val", sampling=sampling)
        for task in choose_tasks(job.data.validation, TASKS)
    ]
    display.on_phase_start("tasks", len(requests))
    with RolloutRuntime(engine=upstream, timer=StepTimer(), config=config, run=run, **parts) as runtime:
        return runtime.run(requests, deadline_s=config.step_deadline_s, on_end=display.on_rollout_end)
