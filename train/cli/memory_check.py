"""The doctor's prediction of the GPU memory of a run: it refuses what the run would refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from groundwire.tools.errors import UserError
from groundwire.train.cli.machine_checks import Check
from groundwire.train.cli.options import with_preset
from groundwire.train.config.overrides import merge_overrides, parse_overrides
from groundwire.train.config.presets import PRESETS
from groundwire.train.config.resolve import resolve, with_file
from groundwire.train.config.verl_presets import VERL_PRESETS
from groundwire.train.job.trainer import trainer_of

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
        plan, unchecked = trainer_of(config.trainer).plan_memory(config, int(gigabytes * 1e9))
    except UserError as error:
        yield Check("failure", f"memory: {error}")
        return
    if unchecked:
        shown = ", ".join(f"{name}={value}" for name, value in unchecked.items())
        remedy = "run this where verl is installed: it refuses settings that verl does not have"
        yield Check("warning", f"memory: without verl, its settings were not checked: {shown}", remedy)
    yield Check("ok", f"memory: predicted {plan}")
