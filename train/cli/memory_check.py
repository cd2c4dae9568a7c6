"""The doctor's prediction of the GPU memory of a run: it refuses what the run would refuse."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.tools.errors import UserError
from groundwire.train.cli.machine_checks import Check
from groundwire.train.cli.options import with_preset
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import merge_overrides, parse_overrides
from groundwire.train.config.presets import PRESETS
from groundwire.train.config.resolve import resolve, with_file
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_presets import VERL_PRESETS

__all__ = ["check_memory", "planned_settings"]


def planned_settings(config: str | None, model: str | None, trainer: str | None, settings: list[str]) -> dict[str, Any]:
    """The settings of the run to be planned, as ``groundwire run`` reads them. Raises :class:`ConfigError`."""
    options, pairs = with_preset({"config": config, "model": model}, settings)
    given = with_file(merge_overrides(options, parse_overrides(pairs)))
    preset = given.get("config") or ("fast" if config else "hf")  # a file without one is fast, as for groundwire run
    default = "verl" if preset in VERL_PRESETS.keys() - PRESETS.keys() else "local"
    return {**given, "config": preset, "trainer": given.get("trainer") or trainer or default, "device": "cuda"}


def check_memory(given: Mapping[str, Any], gigabytes: float | None) -> Iterator[Check]:
    """The predicted memory of a run on a GPU."""
    import torch

    if gigabytes is None:
        if not torch.cuda.is_available():
            yield Check("failure", "memory: there is no GPU here", "give that of another machine: --gpu-memory 80")
            return
        gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
    try:
        config = resolve(given["config"], **given)
        plan, unchecked = (_plan_verl if config.trainer == "verl" else _plan_local)(config, int(gigabytes * 1e9))
    except UserError as error:
        yield Check("failure", f"memory: {error}")
        return
    if unchecked:
        shown = ", ".join(f"{name}={value}" for name, value in unchecked.items())
        remedy = "run this where verl is installed: it refuses settings that verl does not have"
        yield Check("warning", f"memory: without verl, its settings were not checked: {shown}", remedy)
    yield Check("ok", f"memory: predicted {plan}")


def _plan_local(config: RunConfig, available: int) -> tuple[object, Mapping[str, Any]]:
    from groundwire.train.local.update.memory_plan import plan_run

    return plan_run(config, available), {}


def _plan_verl(config: RunConfig, available: int) -> tuple[object, Mapping[str, Any]]:
    """What prints as the predicted memory, and the settings of verl that could not be checked."""
    from groundwire.train.verl import hydra_config

    hydra_config.check_context_length(config)
    flat = hydra_config.flat_config(config)
    installed = importlib.util.find_spec("verl") is not None
    if installed:
        hydra_config.compose(flat)
    plan = hydra_config.plan_run(config, flat, available)
    if plan is None:
        raise ConfigError(
            f"the memory of {config.model} with these settings of verl is not known: models with Llama's layers are "
            "planned, trained with FSDP and without padding"
        )
    if installed:
        return plan, {}
    known = hydra_config.flat_config(config.model_copy(update={"verl": {}})).keys()
    return plan, {name: value for name, value in config.verl.items() if name not in known and name[0] != "+"}
