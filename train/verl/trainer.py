"""The trainer on GPUs: verl trains, and its prompts become rollouts of the same agents, proxy and rewards.

It is not in ``__init__``, which Ray's processes import before they have the run's variables (:mod:`.ray_job`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groundwire.tools.secrets import mask_secrets
from groundwire.tools.terminal import spinner
from groundwire.train.algorithms.model_size import MemoryPlan
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.job.graceful_shutdown import GracefulShutdown
from groundwire.train.job.job import Job
from groundwire.train.job.trainer import Trainer
from groundwire.train.policy.pretrained.locate import find_model, is_hub_name


class VerlTraining(Trainer):
    """``--trainer verl``."""

    in_process = False
    disk_gb = 50

    def model_folder(self, config: RunConfig) -> Path | None:
        """The folder of the model; None for one of the hub, which verl downloads."""
        if is_hub_name(config.model):
            return None
        with spinner("reading the model"):
            return find_model(config.model, any_architecture=True)

    def check(self, job: Job) -> None:
        """As :func:`.launch.check`."""
        from groundwire.train.verl import launch

        with spinner("starting"):
            launch.check(job.config, job.data)

    def train(self, job: Job, run: RunDir, callback: Any, shutdown: GracefulShutdown) -> None:
        """Train until verl ends. verl prints its own progress."""
        from groundwire.train.verl import launch

        launch.train(job.config, job.data, run, callback.on_note)

    def collect(self, run: RunDir) -> None:
        """Write ``metrics.jsonl`` and link ``model`` to the newest checkpoint."""
        from groundwire.train.verl import launch

        launch.collect(run)

    def own_settings(self, config: RunConfig) -> Mapping[str, Any]:
        """verl's settings on this machine."""
        from groundwire.train.verl.hydra_config import count_gpus, flat_config

        return flat_config(config, n_gpus=max(1, count_gpus()))

    def describe(self, job: Job, run_dir: str) -> str:
        """verl's whole configuration as YAML. Raises :class:`ConfigError`."""
        from groundwire.train.verl.hydra_config import compose_for_run

        composed, _ = compose_for_run(job.config, job.data, run_dir)
        from omegaconf import OmegaConf

        return mask_secrets(OmegaConf.to_yaml(composed, resolve=True))

    def plan_memory(self, config: RunConfig, available: int) -> tuple[MemoryPlan, Mapping[str, Any]]:
        """The memory of a run on each GPU, and the settings of verl that cannot be checked without it."""
        from groundwire.train.verl import hydra_config

        hydra_config.check_context_length(config)
        flat = hydra_config.flat_config(config)
        installed = importlib.util.find_spec("verl") is not None
        if installed:
            hydra_config.compose(flat)
        plan = hydra_config.plan_run(config, flat, available)
        if plan is None:
            raise ConfigError(
                f"the memory of {config.model} with these settings of verl is not known: models with Llama's layers "
                "are planned, trained with FSDP and without padding"
            )
        if installed:
            return plan, {}
        known = hydra_config.flat_config(config.model_copy(update={"verl": {}})).keys()
        return plan, {name: value for name, value in config.verl.items() if name not in known and name[0] != "+"}
