"""The default trainer of a run, and its settings as text."""

from __future__ import annotations

import importlib.util
import json

from groundwire import domains
from groundwire.train.config.presets import PRESETS
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_presets import VERL_PRESETS

__all__ = ["default_trainer", "print_config"]


def default_trainer(preset: str | None, *, device: str | None, dev: bool) -> str:
    """verl on a machine with verl and CUDA, else local. Importing torch takes seconds: only if verl is installed."""
    local_only = dev or device == "cpu" or preset in PRESETS.keys() - VERL_PRESETS.keys()
    if local_only or importlib.util.find_spec("verl") is None:
        return "local"
    import torch

    return "verl" if torch.cuda.is_available() else "local"


def print_config(settings: RunConfig, data: domains.TaskData, run_dir: str) -> str:
    """Every setting as JSON; with verl its whole configuration as YAML. Raises :class:`ConfigError`."""
    if settings.trainer != "verl":
        return json.dumps(settings.to_dict(), indent=2)
    from groundwire.train.verl.hydra_config import compose_for_run

    composed = compose_for_run(settings, data, run_dir)
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(composed, resolve=True))
