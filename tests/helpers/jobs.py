"""Jobs of tests: settings with data and parts, without the checks of a command."""

from __future__ import annotations

from typing import Any

from groundwire.domains import Domain, TaskData
from groundwire.train.config.run_config import RunConfig
from groundwire.train.job.job import Job
from groundwire.train.rollouts.factory import make_backend, make_reward

__all__ = ["job_of"]


def job_of(config: RunConfig, domain: Domain, data: TaskData | None = None, **parts: Any) -> Job:
    """A job; what is not given is made from the settings."""
    if "backend" not in parts:
        parts["backend"] = make_backend(config)
    if "reward" not in parts:
        parts["reward"] = make_reward(config, domain)
    return Job(config=config, domain=domain, data=data or domain.load(None), **parts)
