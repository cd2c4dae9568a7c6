"""What a trainer is: one class for each value of the setting ``trainer``, in the package of that name."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire.tools.errors import UserError
from groundwire.tools.secrets import masked_values
from groundwire.tools.terminal import spinner
from groundwire.train.algorithms.model_size import MemoryPlan
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.presets import PRESETS, VERL_PRESETS
from groundwire.train.config.run_config import RunConfig
from groundwire.train.job.graceful_shutdown import GracefulShutdown
from groundwire.train.policy.pretrained.locate import find_model

if TYPE_CHECKING:
    from groundwire.train.job.job import Job

_TRAINERS = {
    "local": "groundwire.train.local:LocalTraining",
    "verl": "groundwire.train.verl.launch:VerlTraining",
    "gepa": "groundwire.train.gepa:PromptTraining",
}


class TrainingError(UserError):
    """Training ended with an error, and the run can be resumed."""

    exit_code = 1


class Trainer:
    """How a job is checked, trained and shown. To make one imports nothing heavy.

    What is not overridden describes a trainer in this process with our own engine.
    """

    in_process = True
    """Whether the model and the agents run in this process; else in others, which the trainer starts."""
    updates_model = True
    """Whether it changes weights; then it needs a learning rate."""
    takes_endpoint = False
    """Whether it can work with a model at an endpoint."""
    disk_gb = 1
    """What its checkpoints may need."""

    def model_folder(self, config: RunConfig) -> Path | None:
        """The folder of the model, which is looked for; None if the trainer downloads it."""
        with spinner("reading the model"):
            return find_model(config.model)

    def check(self, job: Job) -> None:
        """Raise :class:`ConfigError` if the job cannot be trained on this machine. Nothing is written."""

    def train(self, job: Job, run: RunDir, callback: Any, shutdown: GracefulShutdown) -> None:
        """Train until the end. ``callback`` is a :class:`groundwire.train.evaluation.ProgressCallback`."""
        raise NotImplementedError

    def steps_shown(self, config: RunConfig) -> int:
        """Of how many steps the display counts."""
        return config.steps

    def collect(self, run: RunDir) -> None:
        """Write what readers of the run need, and the trainer has not written yet."""

    def result(self, run: RunDir) -> str:
        """What is said of the results besides the accuracies; may be empty."""
        return ""

    def nothing_left(self, config: RunConfig, run: RunDir) -> str:
        """A message if a resumed run has no step left, else an empty text."""
        saved = run.checkpoints.last_step()
        if not 0 < config.steps <= saved:  # with verl, 0 steps are as many as the epochs have
            return ""
        more = saved + config.steps
        return f"all {saved} steps are done; to train further, give more steps, e.g. --steps {more}"

    def own_settings(self, config: RunConfig) -> Mapping[str, Any] | None:
        """The settings of another package that trains, by their dotted names; None if there is none."""
        return None

    def describe(self, job: Job, run_dir: str) -> str:
        """Every setting of a run."""
        return json.dumps(masked_values(job.config.to_dict()), indent=2)

    def plan_memory(self, config: RunConfig, available: int) -> tuple[MemoryPlan, Mapping[str, Any]]:
        """The memory of a run on a GPU with ``available`` bytes, and settings that could not be checked."""
        raise NotImplementedError


def trainer_of(name: str) -> Trainer:
    """The trainer with this value of the setting ``trainer``."""
    trainer: Trainer = pkgutil.resolve_name(_TRAINERS[name])()
    return trainer


def default_trainer(preset: str | None, *, device: str | None, dev: bool) -> str:
    """verl on a machine with verl and CUDA, or for a preset of its own, else local.

    Importing torch takes seconds: only if verl is installed.
    """
    if preset in VERL_PRESETS.keys() ^ PRESETS.keys():
        return "verl" if preset in VERL_PRESETS else "local"
    if dev or device == "cpu" or importlib.util.find_spec("verl") is None:
        return "local"
    import torch

    return "verl" if torch.cuda.is_available() else "local"
