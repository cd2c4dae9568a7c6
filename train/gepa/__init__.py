"""Optimises the named prompts of an agent in place of its model, with the ``gepa`` package."""

from __future__ import annotations

import importlib.util
from typing import Any

from groundwire.tools.files import read_json
from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import spinner
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.job.graceful_shutdown import GracefulShutdown
from groundwire.train.job.job import Job
from groundwire.train.job.prepare import relative_path
from groundwire.train.job.trainer import Trainer

PROMPTS = "prompts.json"
"""The file of a run with its best prompts, for ``--prompts``."""


class PromptTraining(Trainer):
    """``--trainer gepa``."""

    updates_model = False
    takes_endpoint = True

    def check(self, job: Job) -> None:
        config = job.config
        if importlib.util.find_spec("gepa") is None:
            raise ConfigError("--trainer gepa: its package is not installed: pip install -e '.[gepa]' in a clone")
        if not config.reflection_model:
            raise ConfigError(
                "--trainer gepa needs a model that writes prompts: --reflection-model NAME, as LiteLLM names it, or "
                "NAME@URL, a model of that endpoint"
            )

    def train(self, job: Job, run: RunDir, callback: Any, shutdown: GracefulShutdown) -> None:
        with spinner("starting"), fast_import():
            from groundwire.train.gepa.trainer import PromptTrainer
        PromptTrainer(job, run=run, callback=callback).train()

    def steps_shown(self, config: RunConfig) -> int:
        """The validation after it is that of a step."""
        return 1

    def result(self, run: RunDir) -> str:
        return f"the best prompts are in {relative_path(run.path)}/{PROMPTS}"

    def nothing_left(self, config: RunConfig, run: RunDir) -> str:
        """A message if the run has used its budget and written its prompts, else an empty text."""
        try:
            used = int(read_json(run.path / "gepa.json")["rollouts"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""
        return "" if used < config.prompt_budget else f"the budget of {used} rollouts is used, and {self.result(run)}"
